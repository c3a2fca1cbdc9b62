"""Entry point of ``python -m faststep``."""

from faststep.cli import main

raise SystemExit(main())
