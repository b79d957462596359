"""The ChatML form of local models as a chat template: other programs render with it what `ChatMLRenderer` renders."""

CHATML_TEMPLATE = r"""{%- macro signature(function) -%}
{{- function['name'] + '(' }}
{%- for name, schema in ((function['parameters'] or {})['properties'] or {}).items() %}
{{- (', ' if not loop.first else '') + name + ': ' }}
{%- if schema['enum'] is defined %}
{%- for value in schema['enum'] %}{{- ('|' if not loop.first else '') + value | tojson(ensure_ascii=True) }}{%- endfor %}
{%- else %}{{- schema['type'] | default('any') | string }}{%- endif %}
{%- endfor %}{{- ')' }}
{%- endmacro %}
{%- macro call(function) -%}
{%- if not function['name'] and function['arguments'] is string %}{{- function['arguments'] }}
{%- else %}
{%- set body = {'name': function['name'], 'arguments': function['arguments']} | tojson %}
{{- body | replace('<tool_call>', '\\u003ctool_call>') | replace('</tool_call>', '\\u003c/tool_call>')
    | replace('</think>', '\\u003c/think>') }}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- ('\n' if not loop.first else '') + signature(tool['function']) }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- set said = namespace(any=false) %}
{%- if message['role'] == 'assistant' and message['reasoning_content'] %}
{{- '<think>\n' + message['reasoning_content'] + '\n</think>\n' }}{%- set said.any = true %}
{%- endif %}
{%- if message['content'] %}{{- ('\n' if said.any else '') + message['content'] }}{%- set said.any = true %}{%- endif %}
{%- for item in message['tool_calls'] or [] %}
{{- ('\n' if said.any else '') + '<tool_call>\n' + call(item['function']) + '\n</tool_call>' }}
{%- set said.any = true %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
