"""How torch.distributed.checkpoint stores a checkpoint's tensors: safetensors and JSON, never a pickle.

Each rank writes one file with its pieces of the tensors, under the tensors' names. `tensors.json` has each tensor's
dtype and shape and, for each of its pieces, the file, the offsets in the unsharded tensor and the sizes. A reader reads
only the slices it needs.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from cuboid.model.hf.folder import DTYPES, NAMES, Planned, Stored, header, in_order, raw, stored_in
from cuboid.train import manifest
from cuboid.train.manifest import Damaged, Sum, durable, write_json

INDEX = "tensors.json"
_TOGETHER = 1 << 20  # elements read at a time


class PieceWriter(StorageWriter):
    """Writes the pieces of one rank. In the end the coordinator's `sums` has the checksums of all ranks' files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.file = folder, f"rank-{rank:05d}.safetensors"
        self.sums: dict[str, Sum] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items, planned = {item.index.fqn: item for item in plan.items}, []
        for name, item in items.items():
            assert item.tensor_data is not None
            dtype = NAMES[item.tensor_data.properties.dtype]
            planned.append(Planned(name, tuple(item.tensor_data.chunk.sizes), dtype))
        results: list[WriteResult] = []
        if planned:
            with durable(self.folder / self.file) as file:
                file.write(header(in_order(planned)))
                for each in in_order(planned):
                    value = planner.resolve_data(items[each.name])
                    assert isinstance(value, Tensor)
                    file.write(raw(value))
            results = [WriteResult(items[each.name].index, each.bytes, (self.file, file.sum)) for each in planned]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = [
                [where[MetadataIndex(name, chunk.offsets)][0], list(chunk.offsets), list(chunk.sizes)]
                for chunk in tensor.chunks
            ]
            tensors[name] = {"dtype": NAMES[tensor.properties.dtype], "shape": list(tensor.size), "pieces": pieces}
        self.sums = dict(where.values())
        self.sums[INDEX] = write_json(self.folder / INDEX, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class PieceReader(StorageReader):
    """Reads from a folder whose files have been verified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        self._stored: dict[str, dict[str, Stored]] = {}
        self._files: dict[MetadataIndex, str] = {}
        known = manifest.read(folder)
        for name, tensor in self._index.items():
            for file, offsets, _ in tensor["pieces"]:
                if file not in known:
                    raise Damaged(folder, [f"{INDEX}, which names {file!r},"])
                self._files[MetadataIndex(name, offsets)] = file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, tensor in self._index.items():
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for _, at, sizes in tensor["pieces"]]
            properties = TensorProperties(DTYPES[tensor["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            self._read(item, planner.resolve_tensor(item).detach())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, into: Tensor) -> None:
        """Read a few rows at a time, because they are in memory twice until they are copied."""
        piece = self._piece(item.storage_index)
        (top, *left), (_, *width) = item.storage_offsets, item.lengths
        rest = [(start, start + n) for start, n in zip(left, width, strict=True)]
        rows = max(1, _TOGETHER // max(1, into[:1].numel()))
        for start in range(0, len(into), rows):
            some = into[start : start + rows]
            some.copy_(piece.read([(top + start, top + start + len(some)), *rest]))

    def _piece(self, index: MetadataIndex) -> Stored:
        file = self._files[index]
        if file not in self._stored:
            self._stored[file] = stored_in(self.folder / file)
        return self._stored[file][index.fqn]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
