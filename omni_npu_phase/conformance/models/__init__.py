# SPDX-License-Identifier: Apache-2.0
"""The model kit: a model's own hooks, driven by the installed runner and held against the model itself."""
