"""What a training takes on each rank, in every way to spread it: memory, messages and time."""

from .dry_run import DryRun, checkpointed, dry_run
from .formats import Format, formats_of
from .machine import Machine
from .ways import Way, bucket_mb_for, chosen, tokens_for_offload, ways_of

__all__ = [
    "DryRun",
    "Format",
    "Machine",
    "Way",
    "bucket_mb_for",
    "checkpointed",
    "chosen",
    "dry_run",
    "formats_of",
    "tokens_for_offload",
    "ways_of",
]
