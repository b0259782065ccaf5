"""What every operation of the instruction set does: inputs, waits, result, signal.

An interpreter needs this page, the descriptor, `headrace.step.buffers` for the shapes and
`headrace.step.division` for how work is divided; nothing else of the model than `Sizes` (norm, rotary
frequencies, logit scale).

Common rules
    R is the row capacity; rows that are not active (ROW_STATE) are computed or skipped as is convenient,
    but never contribute to another row, to the choice of experts, or to attention's work list. Exchange
    buffers are tile-major: [tiles, R, 8], tile t of row r holding elements 8t .. 8t+7. This is the fragment
    order of the activations, and makes what a task publishes one contiguous piece. A task of tiles
    [FIRST_TILE, FIRST_TILE + TILE_COUNT) writes exactly these tiles, all R rows.

    Dot products multiply bfloat16 by bfloat16 and add in float32 in an order that depends on K alone.
    Buffers of type bfloat16 round once, when written. "norm(X)" is X of all hidden elements of a row,
    normalised in float32 with weights norms[NORM] and Sizes.norm and norm_eps, rounded once to bfloat16.

    Pages: a GEMM task reads, for tile t of its own and page p, PAGE_BYTES at WEIGHTS * UNIT + ((t -
    FIRST_TILE) * PAGES_PER_TILE + p) * PAGE_BYTES, tiles outside, pages inside. A tile of EXPERT_UP and
    FFN_UP is 16 rows of weights, two of 8 stored one after the other; every other tile is 8 rows. The
    bytes are those of `headrace.step.layout`. Waits named below are the consumers' unless they say "loader".

EMBED  [tiles of hidden]
    reads ROW_STATE (token of each row) and row `token` of the embedding, which lies at WEIGHTS (its tile 0)
    in the layout of a GEMM's weights: 8 tokens a tile. Not through the ring: no pages. Waits for nothing:
    this SM has finished the step before, which is enough. RESIDUAL[t] = the embedding (float32). Publishes
    X[t] = RESIDUAL[t]. Signals TILE_COUNT.

ROUTER  [tiles of EXPERTS, rounded up]
    norm(X) against the router's rows. Waits: X. ROUTER_LOGITS[t], float32; rows beyond EXPERTS are padding
    and mean nothing. Signals TILE_COUNT.

QKV_PROJ  [tiles of the packed projections]
    norm(X) against rows ordered by KV head: for each KV head the heads of its queries, then its key, then
    its value: (G + 2) * head_dim rows, G = heads / KV heads. All tiles of a task are of KV head KV_HEAD.
    Waits: X. ROPE turns query and key rows (not value) in float32 before rounding, at the row's position;
    Pairing NONE does not. With INTERLEAVED, rows 2i and 2i+1 of a head are a pair. With HALF_SPLIT the
    weights are stored with pair (i, i + head_dim/2) at rows 2i and 2i+1 of each query and key head; results
    go back to elements i and i + head_dim/2, so tiles come in twos (FIRST_TILE and TILE_COUNT even) that
    together fill two tiles of the buffer: stored rows 16u .. 16u+15 are elements 8u .. 8u+7 and head_dim/2 +
    8u .. head_dim/2 + 8u+7.
    Writes QKV[t]; and key and value of every active row into its KV page (KV_PAGES, layer LAYER, block of
    the row's table, offset position % BLOCK_TOKENS), rounded the same; these are for later steps. WINDOW 0
    is the full group's block table, else the sliding group's. Signals TILE_COUNT to the counter of KV_HEAD.

ATTENTION  [share]
    waits, before work on KV head h: counter WAIT_COUNTER + h, arrivals WAIT_ARRIVALS (WAIT_SPAN of them;
    each separately). Loader waits: SAMPLE_COMMIT of the step before (rows, positions and all KV of earlier
    steps). The list of items (row, KV head, chunk), its division into shares and the blocks of a chunk:
    `division.attention_items`. Pages of an item: for each of its blocks in order the K page, then the V
    page of its KV head, PAGE_BYTES each. WINDOW 0 is the full group's block table, else the sliding
    group's. Positions that this step writes (those from the lowest position among the active rows of the
    same slot on) are stale in the page: the loader fetched it before. Before the multiplication, key and
    value at these positions, up to the item's own row's, are put into the landed page from QKV of the row
    that has this slot and position. So a row gives the same bits however its past came about. Keys after
    the row's position, and before position - WINDOW + 1, are masked.
    One block or two at a time: s = q k / sqrt(head_dim), float32; the running maximum m, p = exp(s - m), sum
    l of p in float32, output o of p (rounded to bfloat16) times v in float32; l and o are rescaled when m
    grows.
    PARTIALS[row, KV head, chunk] = o of the G query heads, then their m, then their l. Signals 1.

ATTENTION_MERGE  [tiles of heads * head_dim]
    reads PARTIALS of every active row and of the head of each tile. Waits: ATTENTION. With M the largest
    m_c: (sum over chunks c of exp(m_c - M) o_c) divided by the same sum of exp(m_c - M) l_c, in an order that
    depends on the number of chunks alone. Publishes ATTENTION_OUT[t]. Signals TILE_COUNT. WINDOW as in
    ATTENTION: it decides how many chunks there are.

O_PROJ  [tiles of hidden]
    ATTENTION_OUT against O. Waits: ATTENTION_MERGE. RESIDUAL[t] += result. If OUTPUT is X also publishes
    X[t] = RESIDUAL[t] and signals TILE_COUNT; if it is RESIDUAL there is no signal.

EXPERT_UP  [share; TILE_COUNT tiles for each active expert]
    active experts are those in the top TOP_K of an active row, by raw logit, ties to the lowest index; in
    index order they are numbered a = 0, 1, ... Items (a, t) in this order: `division.share_of`. Loader
    waits: ROUTER (reads ROUTER_LOGITS and ROW_STATE, makes the list, hands it to the consumers). Waits: X;
    second: ROUTER. Pages of tile t of expert e begin at WEIGHTS + e * EXPERT_STRIDE units + t *
    PAGES_PER_TILE * PAGE_BYTES. Its 16 rows are gate and up in turn of elements 8t .. 8t+7. HIDDEN[a *
    TILE_COUNT + t] = silu(gate) * up, float32, rounded once, of all rows. Signals 1.

EXPERT_DOWN  [tiles of hidden]
    HIDDEN of every active expert against its down matrix, K = its width. Loader waits: ROUTER. Waits:
    EXPERT_UP; second: ROUTER. Pages: active experts in index order outside, tiles inside. d = sum over the
    row's own experts of w * (dot product), float32, in index order for each part of the columns and then over
    the parts, where w = sigmoid(logit), with NORMALIZE divided by the sum of the row's TOP_K of these. An
    expert that the row is not routed to adds nothing. RESIDUAL[t] += d (HALVE: d / 2). Then as O_PROJ: OUTPUT
    X publishes X[t] and signals TILE_COUNT.

FFN_UP  [tiles of width]
    as EXPERT_UP of one matrix for all rows. Waits: X. OUTPUT[t] (HIDDEN or SHARED_HIDDEN). Signals
    TILE_COUNT.

FFN_DOWN  [tiles of hidden]
    INPUT against down. Waits: its FFN_UP. RESIDUAL[t] += result (HALVE: half of it). OUTPUT as in O_PROJ.

LM_HEAD  [tiles of the vocabulary]
    norm(X) against the head, times Sizes.logit_scale. Waits: X. LOGITS[t], float32, which only this SM
    reads; rows beyond the vocabulary are padding. No signal.

Sampling runs on every SM with the tiles of its own LM_HEAD (TILE_COUNT may be 0), over active rows. The
meaning is that of `headrace.model.sampling`; "adjusted" logits are those after penalties and bias, "score"
is its step 3. Each SM's tiles are ascending with SHARE, so ties to the lowest id are ties to the lowest
share. A round that no active row needs publishes nothing and does not wait, but signals: all SMs decide
this alike. A launch may leave SAMPLE_SELECT out if none of its rows has top_k or top_p: its counters then
count the steps of the other launches alone.

SAMPLE_STATS
    STATS[share, row] = the largest adjusted logit with its lowest token id, over own tokens; and of rows that
    ask for log-probabilities the largest raw logit and the sum of exp(raw - that) in float64. Signals 1.

SAMPLE_SELECT
    finds the score at the border of top_k, then of top_p. The key of a score is its float32 bits, flipped
    so that unsigned order is numeric order (sign set: all bits, else the sign bit). Waits: STATS in round
    0, later the round before. ROUND:
    TOP_K_DIGIT_i: among own tokens whose key begins with the i digits found so far, adds (integer atomics,
    exact in any order) to HISTOGRAM[i, row, next digit] the number of tokens. The digit found is the one
    where the count from the top reaches k. Rows with top_k.
    TOP_K_TIES: TIES[0, share, row] = number of own tokens whose key is the border's. Of these the first (k
    - number above) by id stay.
    TOP_P_DIGIT_i: the same as above over the tokens left, adding weights floor(2^44 exp(score)), exp by the
    fixed roundings of `headrace.step.oracle.exponential`, to HISTOGRAM[4 + i, row, digit]; the border is
    where the weight from the top reaches ceil(top_p * total), total being all of HISTOGRAM[4, row].
    TOP_P_TIES: TIES[1, share, row] as above: of m equal tokens of weight w the first ceil((needed - weight
    above) / w) stay. Signals 1.

SAMPLE_PICK
    waits: the last SELECT; second: STATS; neither where no row is drawn. Candidate of own tokens: greedy rows
    take STATS' best; others the largest score + noise in float64 (ties: lowest id) among the tokens that
    top_k, top_p and min_p leave.
    CANDIDATES[share, row] = that value, token, its raw logit; and the largest raw logits with ids, as many as
    the row asks for the log-probabilities of. WRITER also puts the host's stop flag there, so that all
    SMs see the same. Signals 1.

SAMPLE_COMMIT
    waits: SAMPLE_PICK. Every SM reduces CANDIDATES in the same way: the row's token (no candidate: share
    had none). Updates its own ROW_STATE: token, position + 1, made + 1; a row that met one of its stop
    tokens or its length becomes inactive; the step is the last if no row is active or the stop flag is set.
    Clears share SHARE of HISTOGRAM (rows of 256 bins: `division.share_of`). WRITER appends tokens and
    log-probabilities to TOKEN_RING; for a row whose largest adjusted logit is not finite, which ends, the
    token is -1. Makes all of this SM's writes of the step visible to every SM (its KV
    pages above all). Signals 1.
    Several rows of one slot (a draft being verified, a piece of a prompt): one step a launch, and what
    becomes of their tokens is the host's to say.
"""
