"""``python -m fugaku_gpt``: the same as the command ``fugaku-gpt``."""

from fugaku_gpt.cli.main import main

if __name__ == "__main__":
    main()
