"""Serving: an HTTP front end and an engine process, driven by a policy of the family "serve".

    with start_server("path/to/model") as server:
        ...  # requests to server.url + "/v1/completions"

| module                                   | decides                                        |
|------------------------------------------|------------------------------------------------|
| handle, front                            | processes and addresses                        |
| app, routes_*, answers                   | routes; responses, streams, errors             |
| parameters, protocol, chat, forms        | the OpenAI interface: bodies and answers       |
| generation, text                         | tokens to text, stop strings                   |
| client, stream, commands, metrics        | the front end's side of an engine              |
| supervisor, process, heartbeat, wire     | an engine process that is kept running         |
| core, start, settings                    | the engine process                             |
| world, engine, step, offline             | events and actions; one batch plan carried out |
| sampling, draws, logit_rules             | the choice of a token                          |
| model, layer_work, packed, kv, blocks    | packed weights; paged cache                    |
| adapters, adapter_fit, sleep             | LoRA in a batch; memory given back             |
| kv_room, warm, bench                     | what fits; what a step costs                   |
"""

from phalanx.engines.serve.handle import ServerHandle, start_server
from phalanx.engines.serve.settings import Sampling, ServeSettings

__all__ = ["Sampling", "ServeSettings", "ServerHandle", "start_server"]
