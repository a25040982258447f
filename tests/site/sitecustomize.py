# SPDX-License-Identifier: Apache-2.0
"""Run by every Python that ``ci/test`` starts, engines' processes too: garbage is looked for less often.

Importing vLLM-Omni makes 800,000 objects and no garbage. Python looks through them again and again, and once more at
its end: two fifths of what the import takes. Only ``ci/test`` sets this; elsewhere tests run as users' processes do.
"""

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
atexit.register(gc.freeze)
