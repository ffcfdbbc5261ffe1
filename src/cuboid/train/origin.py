"""A model on disk: a Hugging Face folder, or a checkpoint of ours."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from cuboid.data.tokenizer import FILE, Tokenizer, load_tokenizer
from cuboid.model.config import ModelConfig
from cuboid.model.hf import architecture
from cuboid.model.hf.load import Progress
from cuboid.model.hf.load import load as load_folder
from cuboid.model.hf.save import Provenance
from cuboid.model.transformer import Transformer
from cuboid.train import checkpoint


@dataclass(frozen=True)
class Origin:
    """A model to start from. Made by `find`."""

    path: Path  # the folder, the run or the checkpoint
    config: ModelConfig
    run: Path | None  # of a checkpoint

    @classmethod
    def find(cls, path: Path) -> "Origin":
        """Reads a Hugging Face folder, a run folder or one of its checkpoints."""
        path = path.resolve()
        if (path / architecture.CONFIG).is_file():
            return cls(path, architecture.model_config(path), None)
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder; give a Hugging Face folder, a run or a checkpoint{_hub(path)}")
        found = checkpoint.newest(path)
        return cls(path, checkpoint.model_config(found), found.parent.parent)

    @property
    def tokenizer_file(self) -> Path | None:
        file = (self.run or self.path) / FILE
        return file if file.is_file() else None

    def tokenizer(self) -> Tokenizer:
        if self.run is None and self.tokenizer_file is None:
            raise ValueError(f"{self.path} has no {FILE}; put the model's own there (older formats are not read)")
        return load_tokenizer(self.tokenizer_file)

    def load(self, model: Transformer, progress: Progress = lambda size: None) -> None:
        """Fill a model of this configuration. Every rank calls it."""
        if self.run is None:
            load_folder(self.path, model, progress)
        else:
            checkpoint.load(self.path, model)

    @property
    def provenance(self) -> Provenance | None:
        """Where a checkpoint came from, if from a Hugging Face folder."""
        return None if self.run is None else Provenance.of(self.run)

    def remember(self, run: Path) -> None:
        """Keep what the export of a run that starts from this model will need."""
        if self.run is None:
            Provenance.keep(self.path, run)
        elif (provenance := self.provenance) is not None:
            shutil.copytree(provenance.folder, run / provenance.folder.name, dirs_exist_ok=True)


def _hub(path: Path) -> str:
    """How to download it, if `path` may be the name of a model on the Hub: one or two words."""
    here = Path.cwd().resolve()
    if path.exists() or not path.is_relative_to(here) or len(name := path.relative_to(here).parts) > 2:
        return ""
    model = "/".join(name)
    download = f"hf download {model} --local-dir {name[-1]}"
    return f". If {model} is a model on the Hugging Face Hub, run {download} and give that"
