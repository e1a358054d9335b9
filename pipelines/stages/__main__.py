"""`python -m pipelines.stages NAME`: the stages that need no Ray."""

import sys

from pipelines.stages.runner import run_stage


def main(stage: str) -> None:
    """Run one stage in the working directory; each imports only what it needs."""
    match stage:
        case "validate":
            from pipelines.stages import validate

            run_stage(stage, validate.run)
        case "register":
            from pipelines.stages import register

            run_stage(stage, register.run)
        case _:
            sys.exit(f"no stage {stage!r} runs without Ray; see dvc.yaml for its command")


if __name__ == "__main__":
    main(*sys.argv[1:])
