"""Plug-ins in processes of their own: what they do to a process, they do to theirs.

`rooms` is the run's side, `inside` what such a process does, `state` what an import may not change.
The run's own process imports a plug-in too, to plan with it, once a room has seen that this does no
harm; it never calls what decodes.
"""
