"""The entry point of group `verl.plugins`: every process that imports verl imports this, and the losses are registered.

verl swallows what goes wrong here. So nothing relies on it: the settings of the loss verify the registration wherever they are
built, in the driver and in every worker (`lossconfig`).
"""

from __future__ import annotations

import os

if os.environ.get("IWOPD_VERL_CPU") == "1":  # tests on machines without GPUs; before anything asks verl for its platform
    from iwopd.cluster.verl import testing

    testing.install()

from iwopd.cluster.verl.registration import register

register()
