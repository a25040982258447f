# SPDX-License-Identifier: Apache-2.0
"""What a step costs the host: the released runner beside the mixin, on the same rows, counted and timed."""
