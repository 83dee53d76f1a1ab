"""Plug-ins in their own processes, so that they cannot affect other methods or the run.

The main process of the run sends orders to a plug-in process and receives replies. The modules
`plugin_process` and `plugin_methods` run in the main process. The module `orders` runs in the
plug-in process. The module `state` lists process-wide state that importing a plug-in must not
change.

The main process also imports the plug-in, to plan its methods, but never decodes with it. Before
that, the plug-in process has imported the plug-in without changing process-wide state.
"""
