# SPDX-License-Identifier: Apache-2.0
"""What tests need where hardware is missing; importable by other projects' tests."""
