# SPDX-License-Identifier: Apache-2.0
"""The ``omni-npu-phase`` command, also as ``python -m omni_npu_phase``."""

import sys


def main() -> None:
    """Run the command line; exit 2 with advice where its own libraries are missing."""
    try:
        from omni_npu_phase.commands.app import app
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("rich", "typer"):
            raise
        sys.stderr.write("error: the command line needs rich and typer; pip install rich typer\n")
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
