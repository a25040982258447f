# SPDX-License-Identifier: Apache-2.0
"""Model code judged by its source: where a hook tells its phase, slices its prompt or writes against the contract.

``files`` finds the models, ``source`` their methods, ``walk`` follows a hook for each row of the contract's table,
``findings`` reads what the walks saw by the ``rules``, and ``report`` says it.
"""
