"""Copy any store into a new LMDB or Parquet store, as `raypipe convert` does, on the cluster that gets the job.

    ray job submit --working-dir . -- python jobs/convert.py s3://bucket/raw.parquet /shared/train.lmdb

The last line of its output is one JSON object: samples, classes, bytes, skipped, without_size.
"""

import sys

from raypipe.commands.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
