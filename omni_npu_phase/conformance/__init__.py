# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: scenarios as data, a driver around a real runner, and a verdict for every clause.

The contract outranks the kit: a clause is judged by what the rows of a scenario must show, never by another runner.
Importing this package loads no torch; :mod:`omni_npu_phase.conformance.verify` runs scenarios.
"""
