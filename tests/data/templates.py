"""Templates that behave like the stock ones of four model families, in as few words as possible.

What matters is how they treat turns, not their exact text: Gemma 3 folds the system turn into the
user's and wants turns that alternate; Gemma 4 (31B) prompts with an empty thought that a rendered
turn does not have; Llama 3 begins with a system turn that holds the day; Qwen 3 drops the reasoning
of earlier turns and writes an empty one into the last.
"""

from __future__ import annotations

GEMMA_3 = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set head = '' %}{% set turns = messages %}"
    "{% endif %}"
    "{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ (head if loop.first else '') + m.content | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)

GEMMA_4 = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n<channel>thought\n<end_channel>{% endif %}"
)

LLAMA_3 = (
    "{{ bos_token }}"
    "{% set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
    "{% set own = messages[0].role == 'system' %}"
    "<turn>system<h>\n\nToday: {{ day }}\n\n{{ messages[0].content | trim if own }}<end>"
    "{% for m in (messages[1:] if own else messages) %}"
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "<turn>assistant<h>\n\n"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<end>'
    "{% elif m.role == 'tool' %}<turn>ipython<h>\n\n{{ m.content | tojson }}<end>"
    "{% else %}<turn>{{ m.role }}<h>\n\n{{ m.content | trim }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant<h>\n\n{% endif %}"
)

QWEN_3 = (
    "{% if tools %}<turn>system\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<end>\n{% endif %}"
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set said = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<turn>assistant\n"
    "{% if loop.index0 > last.user and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</call>"
    "{% endfor %}<end>\n"
    "{% elif m.role == 'tool' %}<turn>user\n<answer>{{ m.content }}</answer><end>\n"
    "{% else %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

# The first with the blocks that Hugging Face's own masks want.
WITH_BLOCKS = (
    "{% for m in messages %}<turn>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

STOCK = {"gemma3": GEMMA_3, "gemma4": GEMMA_4, "llama3": LLAMA_3, "qwen3": QWEN_3}
SPECIAL = ("<turn>", "<end>", "<channel>", "<end_channel>", "<s>")
