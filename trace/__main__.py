"""`python -m trace_rl` is `trace-rl`."""

from trace_rl.cli import main

if __name__ == "__main__":
    main()
