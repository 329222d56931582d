// The device functions of train_gpt_sparse.cu one by one, against the functions of the same name in train_cpu.c (or a plain
// loop where there is none), on fresh random inputs. Included by test_gpt_sparse.cu, whose whole steps cover what is left:
// the attention core and the dense path. Sizes divide nothing; rows lie apart; addresses are aligned or not.
//
// Memory on the device holds 0xff (NaN in every float type) before, between and behind what belongs to an operand: what is read
// beyond it turns results into NaN, what is written beyond it is found. In bf16 inputs are rounded first, so that both sides
// start from equal numbers; the limit is then that of rounding the result once (2^-9 of each value), with room.

static const double LIMIT_FLOAT = 1e-5, LIMIT_X = sizeof(floatX) == 4 ? 1e-5 : 1e-2; // norm-wise relative

// ---- memory, comparisons

enum { GUARD = 256, MOST_ZONES = 256 };
typedef struct { char *base; size_t front, bytes; } Zone; // guard of front bytes, data, guard of GUARD bytes
static Zone zones[MOST_ZONES];
static void *host_arrays[MOST_ZONES];
static int n_zones, n_host_arrays;

// n elements on the device, all 0xff, shift elements behind an aligned address. settle() takes them back.
template <class A> static A *take(int64_t n, int64_t shift) {
    Zone z = {NULL, GUARD + (size_t)shift * sizeof(A), (size_t)n * sizeof(A)};
    if (n_zones == MOST_ZONES) die("kernels.h: more than %d arrays in one test", n_zones);
    CUDA_CHECK(cudaMalloc(&z.base, z.front + z.bytes + GUARD));
    CUDA_CHECK(cudaMemset(z.base, 0xff, z.front + z.bytes + GUARD));
    zones[n_zones++] = z;
    return (A *)(z.base + z.front);
}

// n floats on the host, all 0xff: in what is wanted this means "not to be written", in an input "not to be read".
static float *array(int64_t n) {
    if (n_host_arrays == MOST_ZONES) die("kernels.h: more than %d arrays in one test", n_host_arrays);
    float *x = (float *)xalloc((size_t)n * sizeof(float));
    memset(x, 0xff, (size_t)n * sizeof(float));
    host_arrays[n_host_arrays++] = x;
    return x;
}
static int untouched(const void *x, size_t bytes) {
    const unsigned char *b = (const unsigned char *)x;
    size_t i = 0;
    while (i < bytes && b[i] == 0xff) i++;
    return i == bytes;
}

// A copy on the device of n host floats, as A.
template <class A> static void set(A *to, const float *from, int64_t n) {
    A *x = (A *)xalloc((size_t)n * sizeof(A));
    for (int64_t i = 0; i < n; i++) {
        if (untouched(&from[i], sizeof from[i])) memset((void *)&x[i], 0xff, sizeof x[i]);
        else x[i] = (A)from[i];
    }
    gpu_copy(to, x, (size_t)n * sizeof(A), cudaMemcpyHostToDevice);
    free(x);
}
template <class A> static A *put(const float *from, int64_t n, int64_t shift) {
    A *x = take<A>(n, shift);
    set(x, from, n);
    return x;
}
static int32_t *put_ints(const int32_t *from, int64_t n) {
    int32_t *x = take<int32_t>(n, 0);
    gpu_copy(x, from, (size_t)n * sizeof(int32_t), cudaMemcpyHostToDevice);
    return x;
}

// What a test found so far: the error that is largest by its limit, that ratio, and bytes of guards that changed.
static double found_error, found_share;
static int64_t found_stray;
static void found(double error, double limit) {
    if (error / limit <= found_share || found_share != found_share) return; // NaN sticks
    found_share = error / limit;
    found_error = error;
}
// Hold n values on the device against those wanted; where want says "not to be written", they must not be. floor: the norm
// below which errors are absolute, for results that may cancel.
template <class A> static void expect_within(double limit, double floor, const A *device, const float *want, int64_t n) {
    A *x = (A *)xalloc((size_t)n * sizeof(A));
    double diff = 0, norm = 0;
    gpu_copy(x, device, (size_t)n * sizeof(A), cudaMemcpyDeviceToHost);
    for (int64_t i = 0; i < n; i++) {
        if (untouched(&want[i], sizeof want[i])) {
            found_stray += !untouched(&x[i], sizeof x[i]);
            continue;
        }
        double d = (double)(float)x[i] - (double)want[i];
        diff += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    free(x);
    norm += floor * floor;
    found(norm > 0 ? sqrt(diff / norm) : sqrt(diff), limit);
}
static const double NO_ROUNDING = 1e-12; // for copies
template <class A> static void expect(const A *device, const float *want, int64_t n) { expect_within(sizeof(A) == 4 ? LIMIT_FLOAT : LIMIT_X, 0, device, want, n); }
static void expect_ints(const int32_t *device, const int32_t *want, int64_t n) {
    int32_t *x = (int32_t *)xalloc((size_t)n * sizeof(int32_t));
    gpu_copy(x, device, (size_t)n * sizeof(int32_t), cudaMemcpyDeviceToHost);
    found(memcmp(x, want, (size_t)n * sizeof(int32_t)) ? INFINITY : 0, 1);
    free(x);
}

// The guards of all arrays, which are given back.
static void settle(void) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGetLastError());
    for (int i = 0; i < n_zones; i++) {
        const Zone *z = &zones[i];
        char *x = (char *)xalloc(z->front + GUARD);
        CUDA_CHECK(cudaMemcpy(x, z->base, z->front, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(x + z->front, z->base + z->front + z->bytes, GUARD, cudaMemcpyDeviceToHost));
        for (size_t b = 0; b < z->front + GUARD; b++) found_stray += x[b] != (char)0xff;
        free(x);
        CUDA_CHECK(cudaFree(z->base));
    }
    for (int i = 0; i < n_host_arrays; i++) free(host_arrays[i]);
    n_zones = n_host_arrays = 0;
}
// One check for all that was found since the last.
static void report(const char *name, int64_t n, int64_t d) {
    settle();
    check(found_share <= 1 && found_stray == 0, "%-28s n=%-4lld d=%-4lld error %.1e%s", name, (long long)n, (long long)d, found_error,
          found_stray ? ", writes outside" : "");
    found_error = found_share = 0;
    found_stray = 0;
}

// ---- inputs

static double normal(void) { return rng_normal(seed, 78, draws++); }
static float rounded(double x) { return (float)(floatX)(float)x; }
template <class A> static float *random_array(int64_t n, double size) { // as A holds them
    float *x = array(n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)(A)(float)(size * normal());
    return x;
}

// Rows of heads * width values in a buffer, as the trainer's Rows address them: heads are "head" apart, rows ld, and
// seq_rows of them belong to a sequence of T (0: no gaps between sequences).
typedef struct { int64_t ld, head, seq_rows, T, total; } Shape;
static int64_t row_start(const Shape *s, int64_t i) { return (s->seq_rows ? i / s->T * s->seq_rows + i % s->T : i) * s->ld; }
// regular: gaps are multiples of eight.
static Shape draw_shape(int64_t n, int64_t heads, int64_t width, int64_t T, int regular) {
    int64_t step = regular ? 8 : 1;
    Shape s;
    s.T = T;
    s.head = width + step * draw(3);
    s.ld = (heads - 1) * s.head + width + step * draw(4);
    s.seq_rows = draw(2) ? 0 : T + draw(4);
    s.total = row_start(&s, n - 1) + (heads - 1) * s.head + width;
    return s;
}
// x [n, heads, width] in its places, nothing between.
static float *spread(const float *x, const Shape *s, int64_t n, int64_t heads, int64_t width) {
    float *y = array(s->total);
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) memcpy(y + row_start(s, i) + h * s->head, x + (i * heads + h) * width, (size_t)width * sizeof(float));
    return y;
}
template <class A> static Rows<A> shaped(A *base, const Shape *s) { return rows_of(base, s->ld, s->seq_rows); }

// Documents that start anywhere, one in "every" tokens (0: one document a row), on both sides.
static void draw_documents(Model *m, int64_t every) {
    for (int64_t i = 0; i < m->N; i++) m->tokens[i] = every && draw(every) == 0 ? m->eot : 6 + (int32_t)draw(m->c.V - 6);
    m->r0 = 0;
    m->nr = m->N;
    find_documents(m);
    gpu_copy(G_.g.doc, m->doc, (size_t)m->N * sizeof(int32_t), cudaMemcpyHostToDevice);
}

// ---- matrix product

// A matrix of rows * len inside a buffer: stride by row and by product of a batch; products stacked or side by side.
typedef struct { int64_t rows, len, ld, step, total; } Operand;
static Operand draw_operand(int64_t rows, int64_t len, int64_t count, int regular) {
    int64_t gap = regular ? 8 : 1;
    Operand o = {rows, len, 0, 0, 0};
    o.ld = max64(2, len + gap * draw(5)); // a stride of 1 has its own test
    o.step = rows * o.ld + gap * draw(5);
    if (draw(2)) { o.step = o.ld; o.ld *= count; }
    o.total = (count - 1) * o.step + (rows - 1) * o.ld + len;
    return o;
}
static float *operand_values(const Operand *o, int64_t count) {
    float *x = array(o->total);
    for (int64_t b = 0; b < count; b++)
        for (int64_t i = 0; i < o->rows; i++)
            for (int64_t j = 0; j < o->len; j++) x[b * o->step + i * o->ld + j] = rounded(normal());
    return x;
}
// One product of every kind: add 0: none, 1: to D itself, 2: another matrix.
template <class Y> static void one_matmul(int64_t M, int64_t N, int64_t K, int64_t count, int ta, int tb, int add, int regular, int one) {
    Operand a = draw_operand(ta ? K : M, ta ? M : K, count, regular), b = draw_operand(tb ? N : K, tb ? K : N, count, regular), d = draw_operand(M, N, count, regular);
    if (one) { a.ld = 1; a.total = a.rows; }
    float *va = operand_values(&a, count), *vb = operand_values(&b, count), *want = add ? operand_values(&d, count) : array(d.total);
    int64_t off = regular ? 0 : draw(4), ars = ta ? 1 : a.ld, aks = ta ? a.ld : 1, bks = tb ? 1 : b.ld, bcs = tb ? b.ld : 1;
    floatX *A = put<floatX>(va, a.total, off), *B = put<floatX>(vb, b.total, off ? draw(4) : 0);
    Y *D = add == 1 ? put<Y>(want, d.total, off) : take<Y>(d.total, off), *other = add == 1 ? D : add == 2 ? put<Y>(want, d.total, off) : NULL;
    gpu_matmul_batch(D, d.ld, d.step, other, A, ars, aks, a.step, B, bks, bcs, b.step, M, N, K, count);
    for (int64_t i = 0; i < count; i++) matmul(want + i * d.step, d.ld, va + i * a.step, ars, aks, vb + i * b.step, bks, bcs, M, N, K, add > 0);
    expect(D, want, d.total);
    settle();
}
template <class Y> static void test_matmul(int64_t M, const char *name) {
    for (int form = 0; form < 4; form++) {
        for (int i = 0; i < 9; i++) {
            int regular = draw(3) == 0;
            int64_t unit = regular ? 8 : 1;
            one_matmul<Y>(M, unit * (1 + draw(140 / unit)), unit * (1 + draw(140 / unit)), i / 3 ? 3 : 1, form & 1, form >> 1, i % 3, regular, 0);
        }
    }
    report(name, M, 0);
}

// ---- norms, sums down the columns

template <class D> static void test_rmsnorm(int64_t n, int64_t d, const char *dy_type) {
    char name[64];
    for (int v = 0; v < 12; v++) {
        int regular = v & 1, weights = v % 3 > 0, add = v / 2 % 2, alias = !add && sizeof(D) == sizeof(floatX) && v % 4 == 1;
        int64_t T = 1 + draw(n), off = regular ? 0 : draw(4);
        float plus = v % 3 == 2;
        Shape sx = draw_shape(n, 1, d, T, regular), sy = draw_shape(n, 1, d, T, regular), sz = alias ? sy : draw_shape(n, 1, d, T, regular);
        float *x = random_array<floatX>(n * d, 2), *w = random_array<float>(d, 1), *y = array(n * d), *rstd = array(n);
        floatX *px = put<floatX>(spread(x, &sx, n, 1, d), sx.total, off), *py = take<floatX>(sy.total, off);
        float *pw = weights ? put<float>(w, d, off) : NULL, *pr = take<float>(n, 0);
        gpu_rmsnorm_forward(shaped(py, &sy), pr, shaped(px, &sx), pw, plus, n, d, 1e-6, T);
        rmsnorm_forward(y, d, rstd, x, d, weights ? w : NULL, plus, n, d, 1e-6);
        expect(py, spread(y, &sy, n, 1, d), sy.total);
        expect(pr, rstd, n);

        float *dy = random_array<D>(n * d, 1), *dx = random_array<floatX>(n * d, 1), *dw = random_array<float>(d, 1);
        D *pdy = put<D>(spread(dy, &sy, n, 1, d), sy.total, off);
        floatX *pdx = alias ? (floatX *)pdy : add ? put<floatX>(spread(dx, &sz, n, 1, d), sz.total, off) : take<floatX>(sz.total, off);
        float *pdw = weights ? put<float>(dw, d, off) : NULL;
        set(pr, rstd, n);
        gpu_rmsnorm_backward(shaped(pdx, &sz), add, pdw, shaped(pdy, &sy), pr, shaped(px, &sx), pw, plus, n, d, T);
        rmsnorm_backward(dx, d, add, weights ? dw : NULL, dy, d, rstd, x, d, weights ? w : NULL, plus, n, d);
        expect(pdx, spread(dx, &sz, n, 1, d), sz.total);
        if (weights) expect(pdw, dw, d);
        settle();
    }
    snprintf(name, sizeof name, "rmsnorm, dy %s", dy_type);
    report(name, n, d);
}

// As the trainer's mla_index_* call them: the sums down the columns are gradients of weights and biases.
static void test_layernorm(int64_t n, int64_t d) {
    for (int v = 0; v < 4; v++) {
        int64_t off = draw(4);
        float *x = random_array<floatX>(n * d, 2), *w = random_array<float>(d, 1), *b = random_array<float>(d, 1), *y = array(n * d), *mean = array(n), *rstd = array(n);
        for (int64_t j = 0; j < n * d; j++) x[j] = rounded(x[j] + 3); // means that are not zero by chance
        floatX *px = put<floatX>(x, n * d, off), *py = take<floatX>(n * d, off);
        float *pw = put<float>(w, d, off), *pb = put<float>(b, d, off), *pm = take<float>(n, 0), *pr = take<float>(n, 0);
        layernorm_forward_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(py, pm, pr, px, pw, pb, n, d, 1e-6f);
        layernorm_forward(y, mean, rstd, x, w, b, n, d, 1e-6);
        expect(py, y, n * d);
        expect(pm, mean, n);
        expect(pr, rstd, n);

        float *dy = random_array<float>(n * d, 1), *dx = array(n * d), *dw = random_array<float>(d, 1), *db = random_array<float>(d, 1);
        float *pdy = put<float>(dy, n * d, off), *pdw = put<float>(dw, d, 0), *pdb = put<float>(db, d, 0);
        floatX *pdx = take<floatX>(n * d, off);
        set(pm, mean, n);
        set(pr, rstd, n);
        gpu_column_sum(pdw, plain_rows(pdy, d), plain_rows(px, d), pr, pm, n, d, n);
        gpu_column_sum(pdb, plain_rows(pdy, d), plain_rows(px, d), NULL, NULL, n, d, n);
        layernorm_backward_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(pdx, pdy, pm, pr, px, pw, n, d);
        layernorm_backward(dx, dw, db, dy, mean, rstd, x, w, n, d);
        expect(pdx, dx, n * d);
        expect(pdw, dw, d);
        expect(pdb, db, d);
        settle();
    }
    report("layernorm, column sums", n, d);
}

template <class D> static void test_column_sum(int64_t n, int64_t d, const char *name) {
    for (int kind = 0; kind < 3; kind++) { // of dy; of dy x rstd; of dy (x - mean) rstd
        int64_t T = 1 + draw(n);
        Shape sx = draw_shape(n, 1, d, T, 0), sy = draw_shape(n, 1, d, T, 0);
        float *x = random_array<floatX>(n * d, 1), *dy = random_array<D>(n * d, 1), *out = random_array<float>(d, 1);
        float *rstd = random_array<float>(n, 1), *mean = random_array<float>(n, 1);
        D *pdy = put<D>(spread(dy, &sy, n, 1, d), sy.total, draw(4));
        floatX *px = put<floatX>(spread(x, &sx, n, 1, d), sx.total, draw(4));
        float *pr = kind ? put<float>(rstd, n, 0) : NULL, *pm = kind == 2 ? put<float>(mean, n, 0) : NULL, *po = put<float>(out, d, draw(4));
        gpu_column_sum(po, shaped(pdy, &sy), shaped(px, &sx), pr, pm, n, d, T);
        for (int64_t j = 0; j < d; j++) {
            double s = 0;
            for (int64_t i = 0; i < n; i++) s += (double)dy[i * d + j] * (kind ? ((double)x[i * d + j] - (kind == 2 ? mean[i] : 0)) * (double)rstd[i] : 1);
            out[j] += (float)s;
        }
        expect(po, out, d);
        settle();
    }
    report(name, n, d);
}

// ---- RoPE, elementwise, embedding

// The rows r0 .. r0 + nr of the model: all, or with one sequence also a part of it.
template <class Y, class A> static void test_rope(Model *m, int64_t layer, const char *name) {
    Model *g = &G_.g;
    int64_t rope = m->c.rope, N = m->N;
    for (int v = 0; v < 12; v++) {
        int layout = v & 1, sign = v & 2 ? -1 : 1, in_place = v % 3 == 0 && sizeof(Y) == sizeof(A);
        int64_t heads = 1 + draw(4), r0 = m->B == 1 && v >= 8 ? draw(N) : 0, n = r0 ? 1 + draw(N - r0) : N;
        Shape src = draw_shape(n, heads, rope, m->T, 0), dst = in_place ? src : draw_shape(n, heads, rope, m->T, 0);
        float *x = random_array<A>(N * heads * rope, 1), *rows = x + r0 * heads * rope;
        A *from = put<A>(spread(rows, &src, n, heads, rope), src.total, draw(4));
        Y *to = in_place ? (Y *)from : take<Y>(dst.total, draw(4));
        m->r0 = g->r0 = r0;
        m->nr = g->nr = n;
        if (in_place) gpu_rotate(g, &g->layers[layer], shaped(to, &dst), dst.head, heads, layout, sign);
        else gpu_rope(g, &g->layers[layer], shaped(to, &dst), dst.head, shaped(from, &src), src.head, heads, layout, sign);
        rotate(m, &m->layers[layer], x, heads * rope, heads, rope, layout, (real)sign);
        expect(to, spread(rows, &dst, n, heads, rope), dst.total);
        m->r0 = g->r0 = 0;
        m->nr = g->nr = N;
        settle();
    }
    report(name, N, rope);
}

static void test_swiglu(int64_t n, int64_t d) {
    for (int v = 0; v < 4; v++) {
        int64_t off = v & 1 ? draw(4) : 0, size = n * d;
        float *g = random_array<floatX>(size, v & 2 ? 40 : 2), *u = random_array<floatX>(size, 1), *act = array(size); // 40: exp overflows
        floatX *pg = put<floatX>(g, size, off), *pu = put<floatX>(u, size, off), *pa = take<floatX>(size, off);
        ELEMENTWISE(swiglu_forward_kernel, aligned(pg), size, pa, pg, pu);
        swiglu_forward(act, g, u, size);
        expect(pa, act, size);

        float *da = random_array<floatX>(size, 1), *dg = array(size), *du = array(size);
        floatX *pda = put<floatX>(da, size, off), *pdg = take<floatX>(size, off), *pdu = take<floatX>(size, off);
        ELEMENTWISE(swiglu_backward_kernel, aligned(pg), size, pdg, pdu, pda, pg, pu);
        swiglu_backward(dg, du, da, g, u, size);
        expect(pdg, dg, size);
        expect(pdu, du, size);
        settle();
    }
    report("swiglu", n, d);
}

// scale, fill, conversions.
static void test_elementwise(int64_t n, int64_t d) {
    int64_t size = n * d;
    for (int64_t off = 0; off < 2; off++) {
        float *x = random_array<float>(size, 1), *y = array(size);
        float *px = put<float>(x, size, off), *pf = take<float>(size, off);
        floatX *pc = take<floatX>(size, off);
        ELEMENTWISE(convert_kernel, aligned(px) && aligned(pc), size, pc, px);
        expect(pc, x, size);
        const floatX *operand = as_operand(px, pc, size);
        expect(operand, x, size);
        found((sizeof(floatX) == 4) == ((const void *)operand == (const void *)px) ? 0 : INFINITY, 1);
        ELEMENTWISE(scale_kernel, 1, size, px, 0.3f);
        ELEMENTWISE(fill_kernel, 1, size, pf, 0.7f);
        for (int64_t i = 0; i < size; i++) { x[i] *= 0.3f; y[i] = 0.7f; }
        expect(px, x, size);
        expect(pf, y, size);
        int64_t ld = d + draw(5), total = (n - 1) * ld + d; // columns
        float *from = array(total);
        for (int64_t i = 0; i < size; i++) from[i / d * ld + i % d] = x[i];
        float *columns = put<float>(from, total, off);
        floatX *pt = take<floatX>(total, off);
        convert_columns_kernel<<<blocks_for(size, BLOCK), BLOCK, 0, stream>>>(pt, columns, ld, d, n);
        expect(pt, from, total);
        settle();
    }
    report("scale, fill, convert", n, d);
}

// Few different tokens, so that most repeat; many are absent: their gradient must stay as it is.
static void test_embedding(int64_t n, int64_t C, int64_t V) {
    for (int v = 0; v < 4; v++) {
        int64_t off = v & 1 ? draw(4) : 0, kinds = v & 2 ? V : 1 + draw(4);
        int32_t *tokens = (int32_t *)array(n);
        float *e = random_array<floatX>(V * C, 1), *x = array(n * C), *dx = random_array<floatX>(n * C, 1), *de = random_array<float>(V * C, 1), *before = array(V * C);
        for (int64_t i = 0; i < n; i++) tokens[i] = (int32_t)(V - 1 - draw(kinds));
        memcpy(before, de, (size_t)(V * C) * sizeof(float));
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < C; j++) {
                x[i * C + j] = e[tokens[i] * C + j];
                de[tokens[i] * C + j] += dx[i * C + j];
            }
        int32_t *pt = put_ints(tokens, n);
        floatX *pe = put<floatX>(e, V * C, off), *px = take<floatX>(n * C, off), *pdx = put<floatX>(dx, n * C, off);
        float *pde = put<float>(before, V * C, off);
        ELEMENTWISE(embedding_forward_kernel, C % 8 == 0 && aligned(pe), n * C, px, pe, pt, C);
        expect_within(NO_ROUNDING, 0, px, x, n * C);
        gpu_inverse_lists(pt, n, 1, n, V);
        embedding_backward_kernel<<<dim3((unsigned)V, blocks_for(C, WARP)), dim3(WARP, ROW_LANES), 0, stream>>>(pde, pdx, G_.list, G_.list_start, C);
        expect(pde, de, V * C);
        settle();
    }
    report("embedding", n, C);
}

// ---- pools

// Candidate e of all sequences is filled by a document.
static int filled(const Model *m, const Layer *l, int64_t e) {
    int64_t x, at;
    for (int64_t i = 0; i < m->N; i++)
        if (completes_pool(m, l, i, &x, &at) && x == e) return 1;
    return 0;
}

// The compressor of an entry (index 0) or of an index key (1): projections with bias, pools with norm and rotation, backward.
static void test_pools(Model *m, int64_t layer, int index) {
    Model *g = &G_.g;
    Layer *l = &m->layers[layer], *gl = &g->layers[layer];
    char name[64];
    int64_t N = m->N, C = m->c.C, d = index ? m->c.DI : m->c.head_dim, width = comp_width(l, d), cands = m->B * l->n_cand;
    int kv = index ? l->ik : l->comp_kv, gate = index ? l->icomp_gate : l->comp_gate, bias = index ? l->icomp_bias : l->comp_bias;
    int norm = index ? l->ik_norm : l->comp_norm;
    int64_t from = draw(4), rows = l->n_cand + from + draw(3), total = m->B * rows * d;
    float *comp = array(N * width), *ent = array(cands * d), *rstd = array(cands), *out = array(total);
    for (int64_t i = 0; i < N * C; i++) l->xn[i] = rounded(normal());
    set(X(gl->xn), l->xn, N * C);
    floatX *pcomp = take<floatX>(N * width, 0);
    gpu_compress_project(g, gl, pcomp, kv, gate, bias, d);
    compress_project(m, l, comp, kv, gate, bias, d);
    expect(pcomp, comp, N * width);

    for (int64_t i = 0; i < N * width; i++) comp[i] = rounded(i < N * width / 2 ? normal() : 2 * normal());
    set(pcomp, comp, N * width);
    floatX *pent = take<floatX>(cands * d, 0), *pout = take<floatX>(total, 0);
    float *prstd = take<float>(cands, 0);
    gpu_compress_forward(g, gl, pcomp, d, pent, prstd, norm, rows_of(pout + from * d, d, rows));
    compress_forward(m, l, comp, d, ent, rstd, norm, out, rows, from);
    for (int64_t e = 0; e < cands; e++) // the device norms pools that no document fills as well: zeros
        if (!filled(m, l, e)) {
            rstd[e] = (float)(1 / sqrt(m->c.rms_eps));
            for (int64_t j = 0; j < d; j++) out[(e / l->n_cand * rows + from + e % l->n_cand) * d + j] = 0;
        }
    expect(pent, ent, cands * d);
    expect_within(LIMIT_X, 0, prstd, rstd, cands); // of entries that were rounded
    expect(pout, out, total);

    float *d_out = array(total), *d_ent = array(cands * d), *dxn = random_array<floatX>(N * C, 1);
    for (int64_t i = 0; i < cands * d; i++) {
        ent[i] = rounded(ent[i]);
        d_out[(i / d / l->n_cand * rows + from + i / d % l->n_cand) * d + i % d] = (float)normal();
    }
    set(pent, ent, cands * d);
    set(prstd, rstd, cands);
    float *pd_out = put<float>(d_out, total, 0);
    floatX *pd_ent = take<floatX>(cands * d, 0), *pdxn = index ? NULL : put<floatX>(dxn, N * C, 0);
    zero_grads(m);
    gpu_zero_grads(m);
    gpu_compress_backward(g, gl, pdxn, pcomp, d, pent, prstd, norm, kv, gate, bias, rows_of(pd_out + from * d, d, rows), pd_ent);
    compress_backward(m, l, comp, d, ent, rstd, norm, bias, d_out, rows, from, d_ent, m->d_comp);
    compress_project_backward(m, l, index ? NULL : dxn, kv, gate, d);
    expect(pd_out, d_out, total);
    expect(pd_ent, d_ent, cands * d);
    if (cands) expect(X(g->d_comp), m->d_comp, N * width);
    if (!index) expect(pdxn, dxn, N * C);
    const int tensors[] = {kv, gate, bias, norm};
    for (int i = 0; i < 4; i++) expect_within(LIMIT_X, 0, grad(g, tensors[i]), grad(m, tensors[i]), m->tensors[tensors[i]].size); // of gradients that were rounded
    snprintf(name, sizeof name, "pools of %c%s", l->letter, index ? ", index keys" : "");
    report(name, N, d);
}

static void test_block_mean(Model *m, int64_t layer) {
    const Layer *l = &m->layers[layer];
    int64_t N = m->N, DI = m->c.DI, offset = draw(9), width = offset + DI + draw(3), cands = m->B * l->n_cand, e, at, total = (N - 1) * width + offset + DI;
    float *raw = array(total), *mean = array(cands * DI), *d_mean = random_array<floatX>(cands * DI, 1), *d_raw = array(total);
    for (int64_t i = 0; i < N * DI; i++) raw[i / DI * width + offset + i % DI] = rounded(normal());
    for (int64_t i = 0; i < N; i++) {
        if (!completes_pool(m, l, i, &e, &at)) continue;
        for (int64_t x = 0; x < DI; x++) {
            mean[e * DI + x] = 0;
            for (int64_t j = i + 1 - l->r; j <= i; j++) {
                mean[e * DI + x] += raw[j * width + offset + x] / (float)l->r;
                d_raw[j * width + offset + x] = d_mean[e * DI + x] / (float)l->r;
            }
        }
    }
    Pool p = pool_of(&G_.g, &G_.g.layers[layer]);
    floatX *pm = take<floatX>(cands * DI, 0), *pr = take<floatX>(total, 0), *praw = put<floatX>(raw, total, 0), *pdm = put<floatX>(d_mean, cands * DI, 0);
    block_mean_kernel<<<blocks_for(N * DI, BLOCK), BLOCK, 0, stream>>>(p, pm, praw, width, offset, DI);
    block_mean_backward_kernel<<<blocks_for(N * DI, BLOCK), BLOCK, 0, stream>>>(p, pr, pdm, width, offset, DI);
    expect(pm, mean, cands * DI);
    expect(pr, d_raw, total);
    report("block_mean", N, DI);
}

static void test_gate(Model *m, int64_t layer) {
    Layer *l = &m->layers[layer];
    int64_t N = m->N, H = m->c.H, D = m->c.head_dim, n = N * H * D;
    float *dy = random_array<float>(N * m->c.C, 1), *d_q = array(2 * n);
    for (int64_t i = 0; i < n; i++) l->oc[i] = rounded(normal());
    for (int64_t i = 0; i < 2 * n; i++) l->q[i] = rounded(2 * normal());
    qsa_output_forward(m, l);
    qsa_output_backward(m, l, dy);
    floatX *oc = put<floatX>(l->oc, n, 0), *q = put<floatX>(l->q, 2 * n, 0), *d_att = put<floatX>(m->d_att, n, 0), *att = take<floatX>(n, 0), *d_oc = take<floatX>(n, 0);
    floatX *pd_q = take<floatX>(2 * n, 0);
    gate_forward_kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(att, oc, q, D, n);
    gate_backward_kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(d_oc, pd_q, d_att, oc, q, D, n);
    for (int64_t i = 0; i < n; i++) d_q[(2 * (i / D) + 1) * D + i % D] = m->d_q[(2 * (i / D) + 1) * D + i % D]; // the queries' half is another's
    expect(att, l->att, n);
    expect(d_oc, m->d_oc, n);
    expect(pd_q, d_q, 2 * n);
    report("gate", N, D);
}

// ---- classifier

// The reference takes its logits from a product: with the unit matrix as head these are its input, and dxn is their gradient.
static void test_classifier(int64_t n, int64_t V, int learn) {
    int64_t Vp = (V + 63) / 64 * 64;
    Tensor head;
    Model h;
    memset(&head, 0, sizeof head);
    memset(&h, 0, sizeof h);
    h.c.C = h.Vp = Vp; h.c.V = V; h.N = h.nr = h.logit_rows = n; h.tensors = &head; h.learning = learn; h.loss_scale = 1.0 / (double)n;
    h.params = array(Vp * Vp); h.grads = array(Vp * Vp); h.xf = array(n * Vp); h.dxn = array(n * Vp); h.logits = array(n * Vp);
    h.row_loss = array(n); h.row_hit = (int32_t *)array(n); h.targets = (int32_t *)array(n);
    for (int64_t i = 0; i < Vp * Vp; i++) { h.params[i] = i / Vp == i % Vp; h.grads[i] = 0; }
    for (int64_t i = 0; i < n; i++) {
        double size = draw(3) ? 3 : 20;
        h.targets[i] = (int32_t)(draw(5) == 0 ? -1 : draw(V));
        for (int64_t v = 0; v < Vp; v++) h.xf[i * Vp + v] = rounded(v < V ? size * normal() : 1000); // the padding takes no part
        if (h.targets[i] >= 0 && draw(2)) h.xf[i * Vp + h.targets[i]] = rounded(4 * size); // a hit, often
        if (draw(3) == 0) h.xf[i * Vp + draw(V)] = h.xf[i * Vp + draw(V)] = rounded(4 * size); // two largest: the first counts
    }
    floatX *logits = put<floatX>(h.xf, n * Vp, 0);
    float *row_loss = take<float>(n, 0);
    int32_t *row_hit = take<int32_t>(n, 0), *targets = put_ints(h.targets, n);
    classifier_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(logits, targets, row_loss, row_hit, V, Vp, (float)h.loss_scale, learn);
    classifier(&h);
    if (learn) expect_within(LIMIT_X, h.loss_scale, logits, h.dxn, n * Vp); // p - 1 of a sure hit cancels
    else expect_within(NO_ROUNDING, 0, logits, h.xf, n * Vp);
    expect_within(LIMIT_FLOAT, 1, row_loss, h.row_loss, n);
    expect_ints(row_hit, h.row_hit, n);

    int64_t row = draw(n); // a NaN must reach the loss of its row, and of no other
    h.xf[row * Vp + draw(V)] = NAN;
    h.targets[row] = (int32_t)draw(V);
    logits = put<floatX>(h.xf, n * Vp, 0);
    targets = put_ints(h.targets, n);
    classifier_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(logits, targets, row_loss, row_hit, V, Vp, (float)h.loss_scale, learn);
    float *loss = gpu_read(row_loss, n);
    for (int64_t i = 0; i < n; i++) found((i == row) == (loss[i] != loss[i]) ? 0 : INFINITY, 1);
    free(loss);
    report(learn ? "classifier" : "classifier, evaluating", n, V);
}

// ---- selection

static void close_model(Model *m) {
    gpu_close();
    model_free(m);
}

// EXACT: small integers, all sums exact in any order, so the sets must be the same and most k-th scores are tied.
// SPECIAL: the same with NaN and infinite keys and weights. PLAIN: scores that differ by rounding.
enum { EXACT, SPECIAL, PLAIN };
static void draw_scores(Model *m, Layer *l, int kind) {
    int64_t nq = m->N * m->c.HI * m->c.DI, nk = m->B * l->n_cand * m->c.DI, nw = m->N * m->c.HI;
    const float special[] = {NAN, INFINITY, -INFINITY};
    for (int64_t i = 0; i < nq; i++) l->q_index[i] = kind == PLAIN ? rounded(normal()) : (float)(draw(5) - 2);
    for (int64_t i = 0; i < nk; i++) l->k_index[i] = kind == PLAIN ? rounded(normal()) : kind == SPECIAL && draw(150) == 0 ? special[draw(3)] : (float)(draw(5) - 2);
    for (int64_t i = 0; i < nw; i++) l->w_index[i] = kind == PLAIN ? (float)normal() : kind == SPECIAL && draw(40) == 0 ? special[draw(3)] : 0.25f * (float)(draw(9) - 4);
}

// Selected slots of ours that break the contract against the reference's selection in l->sel (kind PLAIN: beyond rounding).
static int64_t wrong_slots(const Model *m, const Layer *l, const int32_t *ours, int kind) {
    int64_t k = m->c.topk, wrong = 0;
    if (kind != PLAIN) {
        for (int64_t i = 0; i < m->N * k; i++) wrong += ours[i] != l->sel[i];
        return wrong;
    }
    real *dots = (real *)xalloc((size_t)(m->c.HI * m->T) * sizeof(real));
    float *row = (float *)xalloc((size_t)m->T * sizeof(float));
    for (int64_t i = 0; i < m->N; i++) {
        int64_t lo, hi, n;
        const int32_t *x = ours + i * k, *ref = l->sel + i * k;
        visible(m, l, i, &lo, &hi);
        n = min64(k, hi - lo);
        index_scores(m, l, i / m->T, i % m->T, 1, 0, l->n_cand, dots, row);
        double kth = INFINITY, size = 0;
        for (int64_t j = 0; j < n; j++) kth = fmin(kth, (double)row[ref[j]]);
        for (int64_t s = lo; s < hi; s++) size = fmax(size, fabs((double)row[s]));
        for (int64_t j = 0; j < k; j++) {
            if (j >= n) { wrong += x[j] != -1; continue; }
            int there = x[j] >= lo && x[j] < hi && (j == 0 || x[j] > x[j - 1]), same = 0;
            for (int64_t s = 0; s < n && there; s++) same |= ref[s] == x[j];
            wrong += !there || (!same && fabs((double)row[x[j]] - kth) > 1e-5 * size);
        }
    }
    free(dots);
    free(row);
    return wrong;
}

static long long device_nans(void) {
    long long n;
    gpu_copy(&n, &G_.sums->nans, sizeof n, cudaMemcpyDeviceToHost);
    return n;
}

// All widths of the kernel give the bits of the one that was chosen.
template <int QB> static void same_selection(const Core &c, const int32_t *want, int64_t B, int64_t first, int64_t rows) {
    int32_t *sel = take<int32_t>((int64_t)c.N * c.k, 0);
    CUDA_CHECK(cudaMemset(sel, 0x7f, (size_t)c.N * (size_t)c.k * sizeof(int32_t)));
    if (gpu_hytopk<QB>(c, sel, (int)B, (int)first, (int)rows)) expect_ints(sel, want, (int64_t)c.N * c.k);
}

static void test_selection(Model *m, int64_t layer, int64_t k) {
    Model *g = &G_.g;
    Layer *l = &m->layers[layer], *gl = &g->layers[layer], before = *gl;
    int64_t planned = m->c.topk, N = m->N, HI = m->c.HI, DI = m->c.DI;
    char name[64];
    m->c.topk = g->c.topk = k;
    for (int kind = EXACT; kind <= PLAIN + 2; kind++) { // the last two: the controls
        for (int part = 0; part <= (kind != PLAIN && m->B == 1 && N > 1); part++) { // of one sequence also some rows alone
            int score = kind > PLAIN ? EXACT : kind;
            long long nans = device_nans();
            int64_t host_nans = m->nan_scores, n = N * k;
            strcpy(m->c.selector, kind == PLAIN + 1 ? "random" : kind == PLAIN + 2 ? "window" : "indexer");
            strcpy(g->c.selector, m->c.selector);
            m->select_seed = g->select_seed = seed;
            draw_documents(m, draw(2) ? 0 : 1 + m->T / 2); // few, so that there is something to choose
            m->r0 = g->r0 = part ? 1 + draw(N - 1) : 0;
            m->nr = g->nr = part ? 1 + draw(N - m->r0) : N;
            draw_scores(m, l, score);
            gl->q_index = (real *)put<floatX>(l->q_index, N * HI * DI, 0);
            gl->k_index = (real *)put<floatX>(l->k_index, m->B * l->n_cand * DI, 0);
            gl->w_index = put<float>(l->w_index, N * HI, 0);
            gl->sel = take<int32_t>(n, 0);
            CUDA_CHECK(cudaMemset(gl->sel, 0x7f, (size_t)n * sizeof(int32_t)));
            memset(l->sel, 0x7f, (size_t)n * sizeof(int32_t));
            gpu_select_forward(g, gl);
            select_forward(m, l);
            found((double)(device_nans() - nans) == (double)(m->nan_scores - host_nans) ? 0 : INFINITY, 1);
            int32_t *ours = (int32_t *)array(n);
            gpu_copy(ours, gl->sel, (size_t)n * sizeof(int32_t), cudaMemcpyDeviceToHost);
            found((double)wrong_slots(m, l, ours, score), 0.5);
            Core c = core_of(g, gl);
            int64_t rows = m->B == 1 ? m->nr : m->T;
            if (kind <= PLAIN && !part && select_path(c, 1, 1) == SELECT_PLAIN) { // the baseline: the same set, in chunks of rows
                int32_t *sel = take<int32_t>(n, 0);
                char *space = G_.select;
                G_.select_most = 4 * (1 + draw(3 * max64(1, l->n_cand)));
                G_.select = (char *)take<float>(table_rows(c) * max64(1, l->n_cand), 0);
                CUDA_CHECK(cudaMemset(sel, 0x7f, (size_t)n * sizeof(int32_t)));
                table_select(c, sel);
                G_.select = space;
                expect_ints(sel, ours, n);
            }
            same_selection<8>(c, ours, m->B, m->r0, rows);
            same_selection<4>(c, ours, m->B, m->r0, rows);
            same_selection<2>(c, ours, m->B, m->r0, rows);
            same_selection<1>(c, ours, m->B, m->r0, rows);
            settle();
        }
    }
    settle();
    *gl = before;
    m->r0 = g->r0 = 0;
    m->nr = g->nr = N;
    m->c.topk = g->c.topk = planned;
    strcpy(m->c.selector, "indexer");
    strcpy(g->c.selector, "indexer");
    snprintf(name, sizeof name, "selection of %c", l->letter);
    report(name, N, k);
}

// NaN scores among the k largest of the rows that see more than k.
static int64_t nans_to_choose(const Model *m, const Layer *l) {
    int64_t total = 0, lo, hi;
    real *dots = (real *)xalloc((size_t)(m->c.HI * m->T) * sizeof(real));
    float *row = (float *)xalloc((size_t)m->T * sizeof(float));
    for (int64_t i = 0; i < m->N; i++) {
        int64_t bad = 0;
        visible(m, l, i, &lo, &hi);
        if (hi - lo <= m->c.topk) continue;
        index_scores(m, l, i / m->T, i % m->T, 1, 0, l->n_cand, dots, row);
        for (int64_t s = lo; s < hi; s++) bad += row[s] != row[s];
        total += min64(bad, m->c.topk);
    }
    free(dots);
    free(row);
    return total;
}

// The scan with its lists, and with a table, in one chunk and in several: the reference's sets (kind PLAIN: beyond rounding, and the same for
// both). Adds up how many rows were done again, and for how many only ties were missing.
static void test_scan(const char *letter, int64_t B, int64_t T, int64_t HI, int64_t DI, int64_t k, int64_t *again, int64_t *ties) {
#ifndef PRECISION_FP32
    Model m, *g = &G_.g;
    Config config = small_config(letter, T, B, k, "deepseek_v32");
    config.HI = HI;
    config.DI = DI;
    config_check(&config);
    small_model(&m, &config);
    gpu_open(&m, B, T);
    Layer *l = &m.layers[0], *gl = &g->layers[0];
    int64_t n = m.N * k;
    for (int round = 0; round < 6; round++) {
        int kind = round < 3 ? round : EXACT, positive[] = {5, 50, 300}; // the last three: relu leaves so many of a thousand scores above 0
        draw_documents(&m, draw(2) ? 0 : 1 + T / 2);
        draw_scores(&m, l, kind);
        for (int64_t i = 0; i < m.N * HI * DI && round >= 3; i++) l->q_index[i] = (float)(1 + draw(2));
        for (int64_t i = 0; i < m.N * HI && round >= 3; i++) l->w_index[i] = 0.25f * (float)(1 + draw(8));
        for (int64_t i = 0; i < B * l->n_cand && round >= 3; i++) {
            int sign = draw(1000) < positive[round - 3] ? 1 : -1;
            for (int64_t d = 0; d < DI; d++) l->k_index[i * DI + d] = (float)(sign * draw(3));
        }
        for (int64_t i = 0; i < B * l->n_cand * DI; i++) l->k_index[i] = isinf(l->k_index[i]) ? NAN : l->k_index[i]; // an infinite dot product counts as NaN here
        int64_t want_nans = nans_to_choose(&m, l);
        memset(l->sel, 0x7f, (size_t)n * sizeof(int32_t));
        select_forward(&m, l);
        gl->q_index = (real *)put<floatX>(l->q_index, m.N * HI * DI, 0);
        gl->k_index = (real *)put<floatX>(l->k_index, B * l->n_cand * DI, 0);
        gl->w_index = put<float>(l->w_index, m.N * HI, 0);
        Core c = core_of(g, gl);
        int32_t *first = (int32_t *)array(n);
        for (int way = 0; way < 4; way++) {
            int table = way % 2;
            Select x;
            int32_t *sel = take<int32_t>(n, 0), *ours = (int32_t *)array(n);
            char *space = G_.select;
            long long nans = device_nans();
            Retry retry;
            G_.select_most = way < 2 ? (int64_t)1 << 30 : 1 + draw(1 << 20);
            size_t bytes = select_layout(c, table, &x);
            G_.select = (char *)take<float>((int64_t)bytes / 4, 0);
            CUDA_CHECK(cudaMemset(G_.select, 0xff, bytes));
            CUDA_CHECK(cudaMemset(sel, 0x7f, (size_t)n * sizeof(int32_t)));
            scan_select(c, sel, table);
            select_layout(c, table, &x);
            gpu_copy(&retry, x.retry, sizeof retry, cudaMemcpyDeviceToHost);
            *again += table ? 0 : retry.count;
            *ties += table ? 0 : retry.ties;
            gpu_copy(ours, sel, (size_t)n * sizeof(int32_t), cudaMemcpyDeviceToHost);
            found((double)wrong_slots(&m, l, ours, kind), 0.5);
            found(device_nans() - nans == want_nans ? 0 : INFINITY, 1);
            if (way == 0) memcpy(first, ours, (size_t)n * sizeof(int32_t));
            found(memcmp(first, ours, (size_t)n * sizeof(int32_t)) ? INFINITY : 0, 1);
            G_.select = space;
        }
        settle();
    }
    char name[96];
    snprintf(name, sizeof name, "selection by scan, %s, B=%lld, heads %lld x %lld", letter, (long long)B, (long long)HI, (long long)DI);
    report(name, T, k);
    close_model(&m);
#endif
}

// An S layer reads the selection, queries and keys of the D layer before it.
static void test_shared_selection(int64_t d, int64_t s) {
    Model *g = &G_.g;
    Core a = core_of(g, &g->layers[d]), b = core_of(g, &g->layers[s]);
    int same = a.sel == g->layers[d].sel && b.sel == a.sel && b.q_index == a.q_index && b.k_index == a.k_index && b.w_index == a.w_index;
    check(same, "%-28s n=%-4lld", "selection shared by S", (long long)g->N);
}

// Lists by candidate of the (query, slot) that chose it, in the order of the queries.
static void test_inverse_lists(int64_t B, int64_t T, int64_t k, int64_t n_cand) {
    int64_t n = B * T * k, all = B * n_cand, at = 0, wrong = 0;
    int32_t *sel = (int32_t *)array(n);
    for (int64_t i = 0; i < n; i++) sel[i] = (int32_t)(n_cand ? draw(n_cand + 3) : 0) - 1;
    for (int64_t i = 0; i < n; i++) sel[i] = sel[i] < n_cand ? sel[i] : -1;
    gpu_inverse_lists(put_ints(sel, n), B * T, k, T, n_cand);
    int2 *list = (int2 *)xalloc((size_t)n * sizeof(int2));
    int32_t *start = (int32_t *)xalloc((size_t)(all + 1) * sizeof(int32_t));
    gpu_copy(list, G_.list, (size_t)n * sizeof(int2), cudaMemcpyDeviceToHost);
    gpu_copy(start, G_.list_start, (size_t)(all + 1) * sizeof(int32_t), cudaMemcpyDeviceToHost);
    for (int64_t e = 0; e < all; e++) {
        wrong += start[e] != at;
        for (int64_t i = e / n_cand * T; i < (e / n_cand + 1) * T; i++)
            for (int64_t j = 0; j < k; j++)
                if (sel[i * k + j] == e % n_cand) {
                    wrong += list[at].x != i || list[at].y != j;
                    at++;
                }
    }
    wrong += start[all] != at;
    free(list);
    free(start);
    found((double)wrong, 0.5);
    report("inverse_lists", B * T, k);
}

// Rows packed by the device have the words of pack_row(), and come back; rows of every filling, runs and spread.
static void test_packing(int ef, int64_t n, int64_t k, int64_t n_cand) {
    Packing p = packing_of(ef, k, n_cand);
    int32_t *sel = (int32_t *)array(n * k), *words = (int32_t *)array(max64(1, n * p.words));
    for (int64_t i = 0; i < n; i++) {
        int64_t full = min64(k, n_cand), filled = i % 4 == 0 ? full : i % 4 == 1 ? i / 4 % 2 * min64(1, full) : draw(full + 1), spare = n_cand - filled, at = i % 3 ? 0 : spare;
        for (int64_t j = 0; j < k; j++) {
            if (i % 3 == 1 && j < filled) at = (int64_t)(((double)j + (double)draw(1000) / 1000) / (double)filled * (double)(spare + 1));
            if (i % 3 == 2 && draw(20) == 0) at += draw(spare - at + 1);
            sel[i * k + j] = j < filled ? (int32_t)(at + j) : -1;
        }
        pack_row(&p, (uint32_t *)words + i * p.words, sel + i * k);
    }
    int32_t *packed = take<int32_t>(n * p.words, 0), *back = take<int32_t>(n * k, 0);
    pack_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(p, (uint32_t *)packed, put_ints(sel, n * k), n);
    unpack_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(p, back, (uint32_t *)packed, n);
    expect_ints(packed, words, n * p.words);
    expect_ints(back, sel, n * k);
    report(ef ? "packing, ef" : "packing, u16", k, n_cand);
}

// ---- sums over rows, optimizer

static void test_row_sums(Model *m, int64_t n) {
    Model h = *m, *g = &G_.g, before = *g;
    float *loss = random_array<float>(n, 1), *kl = random_array<float>(n, 1);
    h.N = g->N = n;
    h.row_loss = loss; h.row_kl = kl; h.row_hit = (int32_t *)array(n); h.targets = (int32_t *)array(n);
    for (int64_t i = 0; i < n; i++) { h.row_hit[i] = (int32_t)draw(2); h.targets[i] = (int32_t)draw(4) - 1; }
    g->row_loss = put<float>(loss, n, 0);
    g->row_kl = put<float>(kl, n, 0);
    g->row_hit = put_ints(h.row_hit, n);
    g->targets = put_ints(h.targets, n);
    gpu_sums(m);
    take_sums(&h);
    for (int i = 0; i < 2; i++) { // two passes add up
        gpu_count(m);
        count_rows(&h);
    }
    Stats a = gpu_sums(m), b = take_sums(&h), c = gpu_sums(m);
    found(fabs(a.loss - b.loss) + fabs(a.kl - b.kl), 1e-9);
    found(a.hits == b.hits && a.targets == b.targets && c.loss == 0 && c.kl == 0 && c.hits == 0 && c.targets == 0 ? 0 : INFINITY, 1);
    *g = before;
    report("count_rows", n, 0);
}

// Norm-wise relative difference of what was added to old: a in one program, b in the other.
static double change_error(const float *a, const float *b, const float *old, int64_t n) {
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += ((double)b[i] - (double)old[i]) * ((double)b[i] - (double)old[i]);
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

// A snapshot of parameters, moments and working copies on the device: [4, n_params].
static float *device_state(const Model *m) {
    const Model *g = &G_.g;
    int64_t n = m->n_params;
    float *x = (float *)xalloc((size_t)(4 * n) * sizeof(float)), *w = gpu_read(G_.weights, n);
    const float *from[] = {g->params, g->m, g->v};
    for (int i = 0; i < 3; i++) gpu_copy(x + i * n, from[i], (size_t)n * sizeof(float), cudaMemcpyDeviceToHost);
    memcpy(x + 3 * n, w, (size_t)n * sizeof(float));
    free(w);
    return x;
}
static void draw_grads(Model *m, double size) {
    for (int64_t i = 0; i < m->n_params; i++) m->grads[i] = (float)(size * normal());
    gpu_copy(G_.g.grads, m->grads, (size_t)m->n_params * sizeof(float), cudaMemcpyHostToDevice);
}

static void test_update(Model *m) {
    const char *names[] = {"update, clipped", "update, not clipped", "update, no clipping, no KL", "update again"};
    int64_t n = m->n_params;
    double lr = 1e-3, norm[2], want[2];
    float *none = (float *)xalloc((size_t)n * sizeof(float));
    Stats s;
    gpu_sums(m);
    take_sums(m);
    for (int step = 1; step <= 4; step++) {
        m->c.clip = step == 3 ? 0 : 1;
        m->c.kl_coef = step == 3 ? 0 : 1;
        draw_grads(m, step == 2 ? 0.1 / sqrt((double)n) : step == 4 ? 1.5 / sqrt((double)n) : 0.5); // norms below, just above, far above clip
        float *old = device_state(m);
        found(gpu_update(m, step, lr, &s, norm) ? 0 : INFINITY, 1);
        found(update(m, step, lr, &s, want) ? 0 : INFINITY, 1);
        float *new_ = device_state(m);
        for (int i = 0; i < 2; i++) found(fabs(norm[i] - want[i]) / want[i], 1e-10);
        found(change_error(new_, m->params, old, n), 1e-3); // the change alone: parameters are larger, their rounding shows
        found(change_error(new_ + n, m->m, none, n), 1e-5);
        found(change_error(new_ + 2 * n, m->v, none, n), 1e-5);
        for (int64_t i = 0; i < n; i++) found(new_[3 * n + i] == (float)(floatX)new_[i] ? 0 : INFINITY, 1);
        for (int i = 0; i < m->n_tensors && step == 3; i++) // untrained indexers stay as they are
            found(m->tensors[i].index && memcmp(new_ + m->tensors[i].offset, old + m->tensors[i].offset, (size_t)m->tensors[i].size * sizeof(float)) ? INFINITY : 0, 1);
        free(old);
        free(new_);
        report(names[step - 1], n, 0);
    }
    for (int kind = 0; kind < 3; kind++) { // a NaN or infinite gradient or a NaN loss: nothing may change
        float bad = kind == 1 ? INFINITY : NAN;
        float *old = device_state(m);
        draw_grads(m, 0.5);
        m->sums.loss = 0;
        if (kind < 2) {
            int64_t at = draw(n);
            m->grads[at] = bad;
            gpu_copy(G_.g.grads + at, &bad, sizeof bad, cudaMemcpyHostToDevice);
        } else {
            m->sums.loss = NAN;
            double loss = NAN;
            gpu_copy(&G_.sums->loss, &loss, sizeof loss, cudaMemcpyHostToDevice);
        }
        int device = gpu_update(m, 5, lr, &s, norm), host = update(m, 5, lr, &s, want);
        float *new_ = device_state(m);
        int same = !memcmp(old, new_, (size_t)(4 * n) * sizeof(float));
        check(!device && !host && same, "update, %s: nothing changes", kind == 0 ? "NaN gradient" : kind == 1 ? "infinite gradient" : "NaN loss");
        free(old);
        free(new_);
    }
    draw_grads(m, 0.5);
    check(gpu_update(m, 5, lr, &s, norm) && update(m, 5, lr, &s, want), "update goes on after that");
    free(none);
}

// ---- all of them

// A model of n rows on both sides. Its widths bound those of the sums down the columns.
static void open_model(Model *m, const char *layers, int64_t n, int64_t k) {
    int64_t B = n % 2 == 0 ? 2 : n % 3 == 0 ? 3 : n % 5 == 0 && n < 1000 ? 5 : 1;
    Config c = small_config(layers, n / B, B, k, "deepseek_v32");
    c.F = 264; c.rope = 2 * (1 + draw(6)); c.head_dim = 24; c.kv_lora = 36; c.HI = 3;
    c.DI = n % 4 == 1 ? 40 : 24; // more than a tile of the selection, and less
    config_check(&c);
    small_model(m, &c);
    gpu_open(m, B, n / B);
    draw_documents(m, 14);
}

static void test_kernels(int small) {
    const int64_t rows[] = {1, 63, 65, 127, 130, 257}, widths[] = {40, 36, 128, 105};
    Model m;
    for (int i = small; i < (small ? 3 : 6); i++) {
        int64_t n = rows[i];
        open_model(&m, "DSCHQ", n, 140);
        test_matmul<floatX>(n, "matmul");
        if (sizeof(floatX) < sizeof(float)) test_matmul<float>(n, "matmul, float results");
        for (int w = 0; w < 4; w++) {
            test_rmsnorm<floatX>(n, widths[w], "as x");
            if (sizeof(floatX) < sizeof(float)) test_rmsnorm<float>(n, widths[w], "float");
            test_layernorm(n, widths[w]);
            test_swiglu(n, widths[w]);
        }
        test_elementwise(n, 40);
        test_elementwise(n, 35);
        test_column_sum<floatX>(n, 35, "column sums");
        test_embedding(n, 40, 97);
        test_embedding(n, 35, 60);
        test_rope<floatX, floatX>(&m, 0, "rope");
        if (sizeof(floatX) < sizeof(float)) {
            test_rope<floatX, float>(&m, 2, "rope, from float");
            test_rope<float, float>(&m, 4, "rope, float");
        }
        test_pools(&m, 2, 0);
        test_pools(&m, 2, 1);
        test_pools(&m, 3, 0);
        test_block_mean(&m, 4);
        test_gate(&m, 4);
        for (int learn = 0; learn < 2; learn++) {
            test_classifier(n, 5, learn);
            test_classifier(n, 97, learn);
            test_classifier(n, n == 65 ? 2049 : 1000, learn);
        }
        for (int64_t l = 0; l < 5; l++)
            if (is_sparse(m.layers[l].letter)) {
                test_selection(&m, l, 1);
                test_selection(&m, l, 9);
                test_selection(&m, l, 140);
            }
        test_shared_selection(0, 1);
        test_inverse_lists(m.B, m.T, 1, m.T);
        test_inverse_lists(m.B, m.T, 9, m.T / 4);
        test_inverse_lists(m.B, m.T, 140, m.T);
        test_row_sums(&m, n);
        close_model(&m);
    }
    open_model(&m, "DC", 130, 9);
    test_column_sum<floatX>(4099, 100, "column sums");
    test_column_sum<float>(4099, 105, "column sums, float");
    test_row_sums(&m, 40001); // more rows than the kernel has threads
    test_update(&m);
    close_model(&m);
    if (!small) {
        open_model(&m, "DQ", 1025, 600); // several compactions of the candidate buffer; fewer queries a block
        test_selection(&m, 0, 1);
        test_selection(&m, 0, 300);
        test_selection(&m, 0, 600);
        test_selection(&m, 1, 90);
        close_model(&m);
    }
    if (sizeof(floatX) < sizeof(float) && gpu_has_wgmma()) {
        const int64_t heads[] = {4, 8, 16, 32, 64}, sizes_[] = {32, 64, 128}, lengths[] = {1, 65, 130, 257, 700, 1100, 1601};
        int64_t again = 0, ties = 0;
        for (int h = 0; h < 5; h++)
            for (int d = 0; d < 3; d++)
                for (int t = 0; t < (small ? 1 : 3); t++) {
                    int64_t T = lengths[draw(7)];
                    test_scan(draw(4) ? "D" : draw(2) ? "C" : "Q", 1 + draw(2), T, heads[h], sizes_[d], 1 + draw(draw(2) ? 20 : T), &again, &ties);
                }
        test_scan("D", 1, small ? 700 : 4200, 8, 64, small ? 30 : 200, &again, &ties);
        if (!small) test_scan("D", 1, 2500, 4, 32, 2048, &again, &ties);
        check(again > 0 && ties > 0, "rows whose guess fails are met: %lld done again, %lld lacking only ties", (long long)again, (long long)ties);
    }
    open_model(&m, "D", 65, 9);
    const int64_t slots[] = {1, 9, 1000, 1024, 2048}, candidates[] = {1, 70, 1023, 1025, 65535, 65536, 65537, 1 << 20, 4 << 20};
    for (int i = 0; i < 2 * 5 * 9; i++) test_packing(i % 2, 63, slots[i / 2 % 5], candidates[i / 10]);
    for (int add = 0; add < 3; add++) one_matmul<float>(1, 40, 65, 1, 1, 0, add, 0, 1);
    report("matmul, both strides 1", 1, 65); // the gradient of a projection to one head: --index-n-heads 1
    close_model(&m);
}
