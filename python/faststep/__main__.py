"""Entry point of ``python -m faststep``."""

from .cli import main

raise SystemExit(main())
