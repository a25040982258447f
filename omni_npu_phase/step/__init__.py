# SPDX-License-Identifier: Apache-2.0
"""One step of a runner: rows and phases, hooks, what they hand over, MTP."""
