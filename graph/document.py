"""Writes docs/modes.md from the graphs and the table of defaults, so that it cannot say anything else.

python -m graph.document > docs/modes.md
"""

from __future__ import annotations

from itertools import groupby

from .defaults import ACTIONS, CLIPS, DEFAULTS, PICTURES, Defaults
from .modes import MODES

TITLES = {
    "nano": "Nano",
    "super": "Super",
    "edge": "Edge",
    "nano-policy-droid": "Nano-Policy-DROID",
    "super-t2i-4step": "Super text-to-image, 4 steps",
    "super-i2v-4step": "Super image-to-video, 4 steps",
}
HEAD = """\
# Modes and defaults

Made by `python -m graph.document` from `graph/modes.py` and `graph/defaults.py`; a test compares.

## Defaults

What a request gets where it says nothing. `cosmoray info FOLDER` prints the part that holds for a snapshot. Sound
changes nothing in it. A shift that is the checkpoint's leaves its own schedule as it is; any other turns Karras sigmas
off. Actions leave the system prompt out.

| checkpoint | mode | size | frames | steps | guidance | shift | fps |
|---|---|---|---|---|---|---|---|
"""
GRAPHS = """
## Graphs

One for each mode. What an arrow carries is an object reference: no result passes through the driver on its way. Where
the file that is asked for holds no sound, `mux` is left out; where a policy's clip is not asked for, `decode`.
"""


def defaults_cells(row: Defaults) -> list[str]:
    """One row of the table, without checkpoint and mode."""
    return [
        "of the scene" if row.width is None else f"{row.width}x{row.height}",
        "chunk + 1" if row.num_frames is None else str(row.num_frames),
        str(row.num_inference_steps),
        f"{row.guidance_scale:g}",
        "checkpoint's" if row.flow_shift is None else f"{row.flow_shift:g}",
        f"{row.fps:g}",
    ]


def modes_document() -> str:
    """The whole page."""
    lines = []
    for family, rows in DEFAULTS.items():
        order = [mode for mode in (*PICTURES, *CLIPS, *ACTIONS) if mode in rows]
        for row, modes in groupby(order, key=lambda mode: rows[mode]):
            lines.append(f"| {TITLES[family]} | {', '.join(modes)} | {' | '.join(defaults_cells(row))} |")
    graphs = [f"\n### {name}\n\n```mermaid\n{graph.to_mermaid()}\n```\n" for name, graph in MODES.items()]
    return HEAD + "\n".join(lines) + "\n" + GRAPHS + "".join(graphs)


if __name__ == "__main__":
    print(modes_document(), end="")
