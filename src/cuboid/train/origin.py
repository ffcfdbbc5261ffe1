"""A model on disk: a Hugging Face folder, or a checkpoint of ours. It is found without torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cuboid.model.config import ModelConfig
from cuboid.model.hf import architecture
from cuboid.train.listing import model_config, newest, runs_near

if TYPE_CHECKING:
    from cuboid.data.tokenizer import Tokenizer
    from cuboid.model.hf.save import Provenance
    from cuboid.model.transformer import Transformer


@dataclass(frozen=True)
class Origin:
    """A model to start from. Made by `find`."""

    path: Path  # the folder, the run or the checkpoint
    config: ModelConfig
    run: Path | None  # of a checkpoint

    @classmethod
    def find(cls, path: Path) -> Origin:
        """Reads a Hugging Face folder, a run folder or one of its checkpoints."""
        path = path.resolve()
        if (path / architecture.CONFIG).is_file():
            return cls(path, architecture.model_config(path), None)
        if not path.is_dir():
            near = runs_near(path) or _hub(path)
            raise ValueError(f"{path} is not a folder; give a Hugging Face folder, a run or a checkpoint{near}")
        found = newest(path)
        return cls(path, model_config(found), found.parent.parent)

    @property
    def tokenizer_file(self) -> Path | None:
        from cuboid.data.tokenizer import FILE

        file = (self.run or self.path) / FILE
        return file if file.is_file() else None

    def tokenizer(self) -> Tokenizer:
        from cuboid.data.tokenizer import FILE, load_tokenizer

        if self.run is None and self.tokenizer_file is None:
            raise ValueError(f"{self.path} has no {FILE}; put the model's own there (older formats are not read)")
        return load_tokenizer(self.tokenizer_file)

    def load(self, model: Transformer, progress: Callable[[int], object] = lambda size: None) -> None:
        """Fill a model of this configuration. Every rank calls it."""
        from cuboid.model.hf.load import load
        from cuboid.train import checkpoint

        if self.run is None:
            load(self.path, model, progress)
        else:
            checkpoint.load(self.path, model)

    @property
    def provenance(self) -> Provenance | None:
        """Where a checkpoint came from, if from a Hugging Face folder."""
        from cuboid.model.hf.save import Provenance

        return None if self.run is None else Provenance.of(self.run)

    def remember(self, run: Path) -> None:
        """Keep what the export of a run that starts from this model will need."""
        from cuboid.model.hf.save import Provenance

        if self.run is None:
            Provenance.keep(self.path, run)
        elif (provenance := self.provenance) is not None:
            shutil.copytree(provenance.folder, run / provenance.folder.name, dirs_exist_ok=True)


def _hub(path: Path) -> str:
    """How to download it, if `path` may be the name of a model on the Hub: one or two words."""
    here = Path.cwd().resolve()
    name = path.relative_to(here).parts if path.is_relative_to(here) else ()
    if path.exists() or not 0 < len(name) <= 2 or name[0] == "runs":
        return ""
    model = "/".join(name)
    download = f"hf download {model} --local-dir {name[-1]}"
    return f". If {model} is a model on the Hugging Face Hub, run {download} and give that"
