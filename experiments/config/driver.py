"""Makes a function of a config a command line, with one-line errors, exit codes and signals."""

import argparse
import atexit
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from experiments.config.compose import compose, composed, one_line_errors, store_methods
from experiments.config.run import freeze
from experiments.config.yaml_files import CONF, text_of, values_of
from experiments.support.errors import Diverged, UserError, exit_with_one_line, one_line

_LAST = """\
`GROUP=CHOICE --help` shows the options of that choice. -m sweeps over
`key=1,2`, --cfg job prints the config."""


def driver(
    config_name: str,
    typed: Callable[..., Any] = freeze,
    after_stop: str = "goes on from the last checkpoint, if there is one",
    groups: tuple[str, ...] = (),
    after_sweep: Callable[[list[Any]], None] | None = None,
    worst: float = math.inf,
) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Make `main(config)` a command line: hydra overrides, `-m` sweeps, errors in one line.

    typed: makes the config of `main` from the composed one.
    after_stop: what the same command will do after an interrupt, unless the interrupt says it.
    groups: the config groups that `main` reads and `--help` shows; () = the whole config.
    after_sweep: called on rank 0 with the results of the runs of a sweep that succeeded.
    worst: what a sweeper gets for a run that diverged, after which it goes on.
    """

    def decorate(main: Callable[[Any], Any]) -> Callable[[], None]:
        def run(overrides: Sequence[str]) -> Any:
            config = composed(config_name, typed, overrides)
            try:
                return main(config)
            except ValueError as error:  # a defect of ours, not a wrong argument
                raise RuntimeError(str(error)) from error

        def sweep(arguments: argparse.Namespace) -> None:
            """Let hydra's launcher make the runs, after a look at the config of each."""
            import hydra
            from hydra.core.hydra_config import HydraConfig

            for job in jobs_of(arguments.overrides):
                composed(config_name, typed, job)

            returned: list[Any] = []
            diverged: list[Diverged] = []

            def task(_: Any) -> float | None:
                with exit_with_one_line(after_stop):
                    try:
                        returned.append(run(HydraConfig.get().overrides.task))
                    except Diverged as error:
                        diverged.append(error)
                        print(f"error: {one_line(error)}", file=sys.stderr)
                        return worst
                    return objective(returned[-1])

            # Hydra then raises its errors instead of printing them over several lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            sys.argv[1:] = ["--multirun", *arguments.overrides]
            store_methods()
            hydra.main("pkg://experiments.conf", config_name, version_base="1.3")(task)()
            if after_sweep and len(returned) > 1 and os.environ.get("RANK", "0") == "0":
                after_sweep(returned)
            if diverged:
                raise UserError(f"runs of the sweep that diverged: {len(diverged)}")

        @functools.wraps(main)
        def command() -> None:
            with exit_with_one_line(after_stop), one_line_errors():
                arguments = parse(sys.argv[1:])
                if arguments.help:
                    module, says = main.__globals__["__spec__"].name, main.__globals__["__doc__"]
                    print(help_text(module, says, config_name, arguments.overrides, groups))
                elif arguments.cfg:
                    from omegaconf import OmegaConf

                    config = compose(config_name, arguments.overrides)
                    print(OmegaConf.to_yaml(config, resolve=arguments.resolve), end="")
                elif arguments.multirun:
                    sweep(arguments)
                else:
                    run(arguments.overrides)
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                end_rank()

        return command

    return decorate


def jobs_of(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep; none if another sweeper than hydra's own makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides([*overrides])
    if any(one.key_or_group == "hydra/sweeper" for one in parsed):
        return []
    own = [one for one in parsed if not one.key_or_group.startswith("hydra")]
    return [job for batch in BasicSweeper.split_arguments(own, None) for job in batch]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse(arguments: Sequence[str], texts: Sequence[str] = ()) -> argparse.Namespace:
    """The command line: flags, `overrides`, and each of `texts` by name (`NAME=`, `--NAME `)."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (("--help", "-h"), ("--multirun", "-m"), ("--resolve",)):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("overrides", nargs="*")
    for name in texts:
        parser.add_argument(f"--{name}")
    as_flags = [f"--{a}" if a.partition("=")[0] in texts else a for a in arguments]
    return parser.parse_intermixed_args(as_flags)


def help_text(
    module: str, docstring: str, config_name: str, overrides: list[str], groups: Sequence[str] = ()
) -> str:
    """The text of `--help`: the driver's docstring, then the file of its options and that of each
    chosen group, which explain them. groups: the groups that it reads; () = its whole config."""
    import hydra
    from omegaconf import OmegaConf

    compose(config_name, overrides)  # says in one line what does not fit
    with hydra.initialize_config_module("experiments.conf", version_base="1.3"):
        composition = hydra.compose(config_name, overrides, return_hydra_config=True)
    found = composition.hydra.runtime.choices.items()
    choices = {group.partition("@")[0]: file for group, file in found if group[:6] != "hydra/"}
    parts = [f"usage: python -m {module} [KEY=VALUE ...] [GROUP=CHOICE ...]\n\n{docstring.strip()}"]
    if not groups:
        parts.append(f"options:\n{text_of(CONF / f'{config_name}.yaml')}")
    for group in groups or choices:
        known = " ".join(sorted(name for name in values_of(group) if "." not in name))
        chosen = choices[group] or "null"
        path = CONF / group / f"{chosen}.yaml"
        said = text_of(path) if path.is_file() else ""
        if group == "method" and not said:  # one of another package has no file
            said = OmegaConf.to_yaml(composition.method)
        parts.append(f"{group}={chosen}, one of: {known}\n{said}")
    return "\n\n".join([*(part.rstrip() for part in parts), _LAST])


def objective(returned: Any) -> float | None:
    """The number that a sweeper such as Optuna's gets: the `val_loss` of a training, the `score` of
    a fine-tuning. returned: what `main` returned, a finished run or a result."""
    result = getattr(returned, "result", returned)
    metrics = result.get("metrics", {}) if isinstance(result, dict) else {}
    found = (metrics.get(name) for name in ("val_loss", "score"))
    return next((float(value) for value in found if value is not None), None)


def end_rank() -> NoReturn:
    """End this process with status 0 without finalising the interpreter: a gloo thread that waits
    for its lock would abort the process, and torchrun report a finished run as failed
    (github.com/pytorch/pytorch/pull/179291)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
