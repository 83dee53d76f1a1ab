"""`python -m specbench_cli` is `specbench`."""

from specbench_cli.app import main

if __name__ == "__main__":
    main()
