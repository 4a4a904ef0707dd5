"""Train a classifier on one stream.

    uv run jobs/train.py                                           the digits that raypipe ships
    uv run jobs/train.py --store.train train.lmdb --store.val val.lmdb
    uv run jobs/train.py --config run.yaml --plan.epochs 90 --train.num_workers 4
    uv run jobs/train.py --resume runs/20261121-104600-3fa2        go on where it stopped
    uv run jobs/train.py --config run.yaml --name mine --resume auto   start, or go on: one command for each start
    ray job submit --working-dir . -- python jobs/train.py --config run.yaml --storage_path s3://my-bucket/runs

The last line of standard output is one JSON object: val_accuracy, images_per_s, wait_fraction, steps, run_dir.
"""

from raypipe.commands.cli import run_job, train

if __name__ == "__main__":
    run_job(train, __doc__)
