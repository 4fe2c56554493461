"""What each loss is trained with by scripts.benchmark.losses: its published settings, and where they come from.

The numbers are those that a paper or its authors' program trains with, on millions of photographs of tens of thousands of
people; no search was made for settings that suit the demo. Only three losses say themselves how a number follows from the
number of identities, and have that here as well: the scale of AdaCos, and the first biases of SphereFace2 and UniFace.
KappaFace refreshes its margins after each epoch, as published.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/losses_settings.py is no program; python -m scripts lists them")

from typing import Any, NamedTuple

from losses import MARGINS, Published, margin_arguments


class Setting(NamedTuple):
    """A row of the benchmark: a loss and the settings that it is trained with."""

    loss: str
    row: Published

    @property
    def title(self) -> str:
        """For tables and pictures."""
        return self.row.title

    @property
    def is_variant(self) -> bool:
        """Whether another row of the same loss stands for it by default."""
        return bool(self.row.arguments)


SETTINGS: dict[str, Setting] = {
    "demo": Setting("cosface", Published("demo", "CosFace as in the demo", "1801.09414", {"scale": 32.0, "margin": 0.3})),
    **{row.name: Setting(loss, row) for loss, margin in MARGINS.items() for row in margin.published},
}


def chosen_settings(names: list[str] | None) -> list[str]:
    """Return the rows that the user named; None = all but variants, ["all"] = every row.

    Raises:
        ValueError: there is no such row.
    """
    if not names:
        return [name for name, setting in SETTINGS.items() if not setting.is_variant]
    if names == ["all"]:
        return list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise ValueError(f"--losses must be all, or among {', '.join(SETTINGS)}; got {' '.join(names)}")
    return list(dict.fromkeys(names))


def loss_arguments(setting: Setting, epoch_steps: int) -> dict[str, Any]:
    """Return every argument of the loss, since one that is left out would keep the value of the configuration below.

    Args:
        epoch_steps: optimizer steps of an epoch, after which KappaFace refreshes its margins.
    """
    defaults = margin_arguments(setting.loss)
    return {**defaults, **({"every": epoch_steps} if "every" in defaults else {}), **setting.row.arguments}
