"""Methods with a defect of their authors' released code, to measure its effect; not for use.

Each file adds one defect to a method and cites where it is in the released code. The tests show the
defect, and that everything else equals the method bit for bit. `reproduce/specs/claims.yaml` lists
the experiments that use them. Their names are `released.<file>`, or `method=released/<file>` on a
command line; they do not appear in lists of methods. They are here and not in `reproduce/` because
a run finds its method by the name in its config, and no lower layer may import `reproduce/`.
"""

from typing import Any


def needs(config: Any, name: str, **options: Any) -> None:
    """Raise ValueError unless these options of a config have these values."""
    if any(getattr(config, option) != value for option, value in options.items()):
        words = ", ".join(f"{option}={value}" for option, value in options.items())
        raise ValueError(f"released.{name} needs {words}")
