"""What a step costs, from the tables of a ``StepCost``, in plain Python."""


def moe_seconds(layer_s, activated):
    """Sum of the MoE layers, each by its activated experts on the busiest rank."""
    return sum(layer_s[count] for count in activated)


def decode_attention_seconds(cost, batch, context):
    """By the mean context, linear between the knots and beyond them."""
    knots = cost.attention_s[batch]
    x = context / batch / cost.context_stride
    left = min(int(x), len(knots) - 2)
    return knots[left] + (knots[left + 1] - knots[left]) * (x - left)


def chunk_attention_seconds(cost, chunks):
    """All chunks together, but no less than the slowest one alone."""
    together, alone = cost.prompt_floor_s, [cost.prompt_floor_s]
    for cached, n in chunks:
        end = cached + n
        pairs = cost.prompt_share_s[end] - cost.prompt_share_s[cached]
        together += max(pairs, cost.prompt_token_s * end)
        alone.append(cost.prompt_floor_s + cost.prompt_alone_s[end] - cost.prompt_alone_s[cached])
    return max(together, *alone)


def step_seconds(cost, own_experts, batch, context, decoded, chunks, rows, activated):
    """Seconds of a step: ``batch`` decodes and ``chunks``, pairs (cached tokens, new tokens).

    ``decoded`` tokens are those of the decodes; lm_head is computed for ``rows`` sequences.
    """
    tokens = decoded + sum(new for _, new in chunks)
    seconds = cost.dense_s[tokens] + cost.collectives_s[tokens] + cost.host_s + cost.head_s[rows]
    if not chunks:
        seconds += moe_seconds(cost.moe_s[decoded], activated) * bool(cost.n_moe_layers)
    elif own_experts:
        seconds += moe_seconds(cost.mixed_moe_s[tokens], activated) * bool(cost.n_moe_layers)
    else:
        seconds += cost.n_moe_layers * cost.uniform_moe_s[tokens]
    if batch:
        seconds += decode_attention_seconds(cost, batch, context)
    if chunks:
        seconds += chunk_attention_seconds(cost, chunks)
    return at_least_launched(cost, seconds, tokens, chunks)


def at_least_launched(cost, seconds, tokens, chunks):
    """Seconds of a step whose kernels the host launches one by one, host time included."""
    launch_s = cost.prompt_launch_s if chunks else cost.launch_s
    if tokens <= (cost.prompt_graph_tokens if chunks else cost.graph_tokens):
        launch_s = 0.0
    return max(seconds, cost.host_s + launch_s)
