"""`ignored`: the ``transition`` of a plugin that has no use for it, and the handler of a message that no part hears.

distributed calls ``transition`` of every plugin for each of the five transitions of a task, with up to seven keywords.
The empty method of its base class then costs one to two microseconds a call, most of it for taking the keywords apart.
A function in C that takes anything and looks at nothing costs a third.
"""

from __future__ import annotations

from typing import Any

#: any arguments; returns nothing of use
ignored: Any = "".format
