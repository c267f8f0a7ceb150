"""What a person sees: stdout carries what was asked for, stderr what is said about it."""

from collections.abc import Sequence

from rich.console import Console

EXIT_STATUSES = (
    "Exit status: 0 finished, or detached from a run that goes on · 1 the training failed · 2 wrong usage or "
    "settings · 3 no such run · 4 the run does not answer · 5 no standby left (resume it) · 6 the store · "
    "7 the saved state · 8 coordination · 9 the run was stopped · 70 a defect of resilient itself."
)
EXIT_STOPPED = 9
EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130

out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)


def say(text: str, style: str = "") -> None:
    """One line on stderr."""
    err.print(text, style=style or None)


def show(text: str, style: str = "") -> None:
    """One line on stdout."""
    out.print(text, style=style or None)


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns that a pipe can take apart again: no frame, nothing cut off."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    show(line(heads), "bold")
    for row in rows:
        show(line(row))
