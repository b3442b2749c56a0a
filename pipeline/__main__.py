"""`python -m pipeline JOB …` is `yoke JOB …`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
