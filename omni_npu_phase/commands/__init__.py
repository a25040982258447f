# SPDX-License-Identifier: Apache-2.0
"""The subcommands, one a module; ``cli`` assembles them."""
