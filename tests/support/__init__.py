"""What tests of several rooms share.

- `waiting`: for what can only be looked at.
- `grpc_server`, `ports`: servers that a test has of its own. `imports`: what comes along with an import.
- `scripted_worker`, `scripted_router`: both sides of the wire between routers and workers; `scripted_processes`
  are what a supervisor starts; `router_site` is a real router with scripted workers, `worker_pair` a real pair.
- The world of handoffs, in one thread, in three layers. `protocol_world` has the protocol's two machines alone, and an
  adversary who chooses what happens next. `driver_world` has both drivers in virtual time, connected by a `link` that
  does what a test asks for. `handoff_world` has roles, schedulers and routers around the drivers.
"""
