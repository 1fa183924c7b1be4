"""Where experts of a pool are before any moves."""

from eldr_sim.simulator.control import placing
from eldr_sim.simulator.run import policies_of


def placement_of(config, prepared, name):
    """Return a pool's first placement; raises InputError for ELDR's."""
    calibration = policies_of(config, prepared).calibration
    seed = config.requests.seed
    return placing.place_pool(prepared, seed, name, None, calibration)[0].placement
