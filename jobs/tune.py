"""Search for an augmentation policy on your own store.

    uv run jobs/tune.py                                            on the digits that scikit-learn ships
    uv run jobs/tune.py --store.train train.lmdb --store.val val.lmdb --tune.trials 24 --tune.epochs 10
    uv run jobs/tune.py --config run.yaml --tune.transforms '[light, heavy]'
    uv run jobs/tune.py --resume runs/tune-20261121-104600         go on where it stopped
    uv run jobs/train.py --config runs/tune-20261121-104600/best.yaml

--resume unpickles Ray Tune's records, and a pickle runs code: give it only folders that nobody else can write to.

The last line of standard output is one JSON object: better, val_accuracy, default_val_accuracy, gain, spread,
policy, config, trials, stopped_early, failed, seconds, run_dir.
"""

from raypipe.commands.cli import run_job
from raypipe.commands.policies import TuneConfig
from raypipe.commands.tune import search

if __name__ == "__main__":
    run_job(search, __doc__, tune=TuneConfig)
