"""Plug-ins in processes of their own, so that they change no other method and not the run.

`plugin_process` is the run's side, `orders` the side of the plug-in process, `state` what an import
must not change. The run's own process imports a plug-in too, to plan with it, once its plug-in
process has shown that the import is harmless; it never calls what decodes.
"""
