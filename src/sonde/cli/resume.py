"""`sonde resume RUN`: resume a paused training."""

from __future__ import annotations

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, RunPath, require_run

EXAMPLES = """
sonde resume runs/first
"""


def resume(run: RunPath, json: AsJson = False) -> None:
    """Resume a training that a hook has paused.

    A paused training waits for the file paused.json in its run to disappear; this takes it away. A run that is not
    paused is left alone.
    """
    from sonde.debug.pause import resume_run

    require_run(run)
    pause = resume_run(run)
    if json:
        print_json({"run": str(run), "was_paused": pause is not None, "pause": pause})
        return
    from sonde.views.terminal import make_console

    console = make_console()
    if pause is None:
        console.print(f"{run} is not paused.", soft_wrap=True, markup=False)
    else:
        message = f"{run} continues at step {pause.get('step')}, where it was paused: {pause.get('reason')}."
        console.print(message, soft_wrap=True, markup=False)
