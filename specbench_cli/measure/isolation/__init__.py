"""Plug-ins in their own processes, so that they cannot affect other methods or the run.

The run sends orders to a plug-in process and receives replies. `plugin_process` and
`plugin_methods` belong to the process of the run, `orders` to the plug-in process. `state` lists
the process-wide state that an import must not change.

The process of the run also imports a plug-in, to plan its methods. It does so after the plug-in
process has imported it safely, and it never decodes with it.
"""
