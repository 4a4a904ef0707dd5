"""A loop of a user's own that saves its state at each step: resumed_stream.py STORE STATE.

It prints each step with a sum of its pixels. If STATE.kill exists, it is killed after step 5.
"""

import os
import sys
from pathlib import Path

import torch

import raypipe

store, state = sys.argv[1:]
kill = Path(f"{state}.kill")
spec = raypipe.open_stream(
    store,
    plan=raypipe.PlanConfig(epochs=2, micro_batch_size=8, seed=1),
    transform=raypipe.TransformConfig(train="light", size=16),
    pool=raypipe.PoolConfig(engine="inline"),
)
loader = raypipe.loader(spec)
if Path(state).exists():
    loader.load_state_dict(torch.load(state))
for epoch in loader.epochs():
    for batch in epoch.train:
        print(loader.global_step, int(batch.image.long().sum()), flush=True)
        torch.save(loader.state_dict(), state)
        if kill.exists() and loader.global_step == 5:
            kill.unlink()
            os.kill(os.getpid(), 9)
