"""Train a classifier on one stream, as `raypipe train` does; a cluster gets this script.

    ray job submit --working-dir . -- python jobs/train.py --config run.yaml --storage-path s3://my-bucket/runs
    uv run jobs/train.py                                              on the digits that raypipe ships
    uv run jobs/train.py --config run.yaml --plan.epochs 90 --train.num-workers 4
    uv run jobs/train.py --resume runs/20261121-104600-3fa2           continues a run
    uv run jobs/train.py --config run.yaml --name mine --resume auto  starts a run, and later continues it

In a job, the last line of output is one JSON object: val_accuracy, images_per_s, wait_fraction, steps, run_dir.
"""

from raypipe.commands.cli import run_job
from raypipe.commands.training import train

if __name__ == "__main__":
    run_job(train, __doc__)
