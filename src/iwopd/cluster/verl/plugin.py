"""The entry point of group `verl.plugins`: every process that imports verl imports this, and the losses are registered.

verl swallows what goes wrong here. So nothing relies on it: the settings of the loss verify the registration wherever they are
built, in the driver and in every worker (`lossconfig`).
"""

from __future__ import annotations

from iwopd.cluster.verl.registration import register

register()
