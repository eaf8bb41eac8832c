"""``python -m hurray_rdma.cli``: the command, where its script is not on the path."""

from hurray_rdma.cli.main import main

if __name__ == "__main__":
    main()
