"""The training loops that are measured as a whole: scripts/ has them, and what the demo runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import faststep.cli.scripts

FOLDERS = (Path(__file__).parent / "scripts", Path(faststep.cli.scripts.__file__).parent)


@dataclass(frozen=True)
class Work:
    """A script, and how long a run of it is.

    Args:
        script: its name in one of the folders.
        what: model and batch.
        steps: measured in each process; some one or two seconds of plain torch on two cores.
        warm_up: steps before these.
        from_files: whether it reads files, with 0, 1 or 2 workers.
        arguments: of the script, besides sizes.
        in_quick: whether the short run has it.
    """

    script: str
    what: str
    steps: int
    warm_up: int = 3
    from_files: bool = False
    arguments: tuple[str, ...] = ()
    in_quick: bool = False

    @property
    def path(self) -> Path:
        return next(path for folder in FOLDERS if (path := folder / self.script).is_file())


WORKS = {
    "CNN": Work("cnn.py", "5 convolutions, 32 x 3 x 64 x 64", 8, in_quick=True),
    "GPT": Work("transformer.py", "4 layers of 256, 8 x 256 tokens of 8192", 6, in_quick=True),
    "MLP": Work("mlp.py", "1024-2048-2048-1024, batch 256", 12),
    "ResNet-18": Work(
        "image_folder.py", "16 x 3 x 128 x 128 from JPEGs", 5, from_files=True, in_quick=True
    ),
    "LSTM": Work("lstm.py", "2 layers of 256, 32 x 64 characters", 12),
    "PPO": Work("ppo.py", "cart-pole, 8 x 128 moves, 16 updates", 12, in_quick=True),
    "diffusion": Work("diffusion.py", "MLP of 128, 32 points", 600, 30),
    "tabular": Work(
        "tabular.py", "MLP of 128, 256 x 32 from a TensorDataset", 600, 30, in_quick=True
    ),
    "autoencoder": Work("autoencoder.py", "VAE 784-400-20, batch 128, GradScaler", 200, 10),
    "LoRA": Work("lora.py", "4 layers of 128, rank 8, 8 x 64 tokens", 60, 5),
}
# The same under autocast.
for _name in ("CNN", "GPT", "MLP", "ResNet-18"):
    WORKS[f"{_name}, bf16"] = replace(WORKS[_name], arguments=("--bf16",), in_quick=False)
