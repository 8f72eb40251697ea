"""`python -m shardwright.pretrain` is the console script `shardwright`."""

import sys

from shardwright.pretrain.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
