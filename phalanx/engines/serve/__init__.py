"""Serving: an HTTP front end and an engine process, driven by a policy of the family "serve".

    with start_server("path/to/model") as server:
        ...  # requests to server.url + "/v1/completions"

| module                        | decides                                                   |
|-------------------------------|-----------------------------------------------------------|
| handle, front, app            | processes and addresses; routes                           |
| supervisor, process, heartbeat| whether the engine process makes progress; starting anew  |
| commands, metrics             | what it was told, told again; what monitoring asks for    |
| protocol, generation, text    | the OpenAI interface; tokens to text                      |
| client, wire, core            | the two sides of the socket between front end and engine  |
| world, engine                 | events and actions; one batch plan carried out            |
| model, kv, blocks, sampling   | packed weights; paged cache; the choice of a token        |
"""

from phalanx.engines.serve.handle import ServerHandle, start_server
from phalanx.engines.serve.settings import Sampling, ServeSettings

__all__ = ["Sampling", "ServeSettings", "ServerHandle", "start_server"]
