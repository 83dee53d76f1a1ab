"""Plug-ins in their own processes, so that they cannot affect other methods or the run.

`plugin_process` runs in the process of the run, and `orders` in the plug-in process. `state` lists
the process-wide state that an import must not change. The process of the run also imports a plug-in
to plan its methods, after the plug-in process has imported it safely. It never decodes with it.
"""
