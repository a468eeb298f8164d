"""Wrote `torch-2.13-dcp.zip`, in an environment with torch: `python write_torch_dcp.py`, two processes on the CPU."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def save(rank: int) -> None:
    """One process of the two."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    w = torch.arange(30, dtype=torch.float32).reshape(5, 6) / 7
    model = {
        "rows.weight": distribute_tensor(w, mesh, [Shard(0)]),
        "columns.weight": distribute_tensor(w, mesh, [Shard(1)]),
        "replicated": distribute_tensor(w[0], mesh, [Replicate()]),
        "half": torch.arange(5, dtype=torch.bfloat16) / 3,
        "ids": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "transposed": w[:2].t(),
    }
    optimizer = {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.999)}], "step": 7}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id="torch_dcp")
    dist.destroy_process_group()


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    os.chdir(tempfile.mkdtemp())
    mp.spawn(save, nprocs=2)
    shutil.make_archive(os.path.join(here, "torch-2.13-dcp"), "zip", "torch_dcp")
