"""One line on the terminal that says how far training is; whole lines in a log, if one is asked for there."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO


class Progress:
    """Shows epoch, loss, its named parts and the time left: rewritten ten times a second on a terminal, else a line an epoch."""

    def __init__(
        self,
        total_steps: int,
        epochs: int,
        done: int = 0,
        stream: TextIO | None = None,
        show: bool | None = None,
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.show = self.stream.isatty() if show is None else show
        self.total, self.epochs = total_steps, epochs
        self.start_step, self.start = done, time.monotonic()
        self.terminal = self.stream.isatty()
        self._shown = 0.0
        self._epoch = 0
        self._values = ""

    def update(self, step: int, epoch: int) -> None:
        """Show that this many steps are done."""
        now = time.monotonic()
        due = now - self._shown >= 0.1 if self.terminal else epoch > self._epoch
        if not self.show or not due:
            return
        self._shown, self._epoch = now, epoch
        if not self.terminal:
            self.stream.write(f"epoch {epoch}/{self.epochs}{self._values}  {self._left(step, now)}\n")
            self.stream.flush()
            return
        share = step / self.total
        bar = "█" * int(20 * share)
        self.stream.write(
            f"\r\x1b[2K{bar:░<20} epoch {epoch}/{self.epochs}{self._values}  {self._left(step, now)}"
        )
        self.stream.flush()

    def values(self, values: Mapping[str, float]) -> None:
        """Set the numbers that are shown."""
        self._values = "".join(f"  {name} {value:.4g}" for name, value in values.items())

    def close(self) -> None:
        """Leave the last state on the screen and end the line."""
        if self.show and self._shown and self.terminal:
            self.stream.write("\n")
            self.stream.flush()

    def note(self, text: str) -> None:
        """Say something on a line of its own (only on a terminal)."""
        if self.show:
            self.stream.write(f"\r\x1b[2K{text}\n" if self.terminal else f"{text}\n")
            self.stream.flush()

    def _left(self, step: int, now: float) -> str:
        made = step - self.start_step
        if made <= 0:
            return "…"
        seconds = int((now - self.start) / made * (self.total - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"
