"""What people see: widgets for a person in a notebook, static pages for everything else.

`mode` decides which; `facts` says it in words; `markup` and `static` draw it as text and HTML, of runs
in `summary` and of other answers in `answers`; `panel` as widgets; `figures` with matplotlib; `render`
updates it. Importing this package loads no widgets.
"""

from __future__ import annotations

from kernel_tools.views.mode import Mode, current_mode

__all__ = ["Mode", "current_mode"]
