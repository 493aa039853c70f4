"""What a new scheduler has to show: an exact timeline of three requests."""

from examples.recipes.scheduler.shortest_first import ShortestFirst
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.mesh import Mesh
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import SimEngine, SimRequest


def test_the_shortest_waiting_prompt_is_served_next():
    lengths = {0: (20, 2), 1: (40, 2), 2: (3, 3)}  # prompt and output tokens
    requests = [
        SimRequest(id=i, arrive_s=0.0, prompt_len=n, max_new=k, num_new=k)
        for i, (n, k) in lengths.items()
    ]
    engine = SimEngine(requests, num_blocks=8, max_running=4, max_step_tokens=16)
    cost = TableCost({"engine.step": 1.0})
    world = SimWorld(Mesh(engine=1), cost, facts=engine.facts, outcomes=engine.outcomes)
    world.post(*engine.arrivals())
    trace = drive(world, reacts=[ShortestFirst()])
    assert engine.finish_s == {2: 3.0, 0: 6.0, 1: 10.0}
    assert trace.column("action_id").tolist() == [
        *("2@0", "2@3", "2@4"),
        *("0@0", "0@16", "0@20"),
        *("1@0", "1@16", "1@32", "1@40"),
    ]
