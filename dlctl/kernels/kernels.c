/* One pass over memory for each update of the servers' optimisers, and for the elements that a
 * sparse push touches. numpy makes one pass per operation.
 *
 * The results are numpy's, bit for bit: every operation is rounded to float32 on its own. So build
 * it with -ffp-contract=off, and keep the order of the operations of the rules in dlctl/optim/.
 * Loops are plain C that compilers vectorise. The interpreter's lock is released in long ones.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fenv.h>
#include <math.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
/* A processor without AVX2 takes the other version; the C library makes the choice when this is
 * loaded (musl's cannot). */
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define NO_DEPENDENCE _Pragma("GCC ivdep")
#elif defined(__clang__)
#define NO_DEPENDENCE _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_DEPENDENCE
#endif

enum { LOCK_MAX = 1 << 12, SLOTS_MAX = 2, CONSTANTS_MAX = 8 };
/* LOCK_MAX: elements of a loop that is shorter than giving the lock to another thread. */

/* ------------------------------------------------------------------ rules of optimisers */

/* The elements of one block. An output is the memory of its input, or does not overlap it. */
typedef struct {
    Py_ssize_t size;
    const float *w, *g, *slots[SLOTS_MAX];
    float *w_next, *slots_next[SLOTS_MAX];
} Block;

typedef void Step(const Block *, const float *);

static inline float sign(float x) {
    return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? 0.0f : x;
}

#define UNPACK                                                                                     \
    const Py_ssize_t n = block->size;                                                              \
    const float *w = block->w, *g = block->g;                                                      \
    float *w_next = block->w_next;

FOR_EACH_PROCESSOR void dlctl_sgd(const Block *block, const float *constants) {
    const float lr = constants[0], decay = constants[1];
    UNPACK
    if (decay == 0) {
        NO_DEPENDENCE
        for (Py_ssize_t i = 0; i < n; i++)
            w_next[i] = w[i] - g[i] * lr;
    } else {
        NO_DEPENDENCE
        for (Py_ssize_t i = 0; i < n; i++)
            w_next[i] = w[i] - (w[i] * decay + g[i]) * lr;
    }
}

FOR_EACH_PROCESSOR void dlctl_momentum(const Block *block, const float *constants) {
    const float lr = constants[0], decay = constants[1], momentum = constants[2];
    const int is_nesterov = constants[3] != 0, decays = decay != 0;
    const float *m = block->slots[0];
    float *m_next = block->slots_next[0];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float x = decays ? w[i] * decay + g[i] : g[i];
        float sum = m[i] * momentum + x;
        m_next[i] = sum;
        w_next[i] = w[i] - (is_nesterov ? sum * momentum + x : sum) * lr;
    }
}

FOR_EACH_PROCESSOR void dlctl_adagrad(const Block *block, const float *constants) {
    const float lr = constants[0], eps = constants[1];
    const float *G = block->slots[0];
    float *G_next = block->slots_next[0];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float sum = G[i] + g[i] * g[i];
        G_next[i] = sum;
        w_next[i] = w[i] - g[i] / (sqrtf(sum) + eps) * lr;
    }
}

FOR_EACH_PROCESSOR void dlctl_rmsprop(const Block *block, const float *constants) {
    const float lr = constants[0], alpha = constants[1], rest = constants[2];
    const float momentum = constants[3], eps = constants[4];
    const float *v = block->slots[0], *b = block->slots[1];
    float *v_next = block->slots_next[0], *b_next = block->slots_next[1];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float square = v[i] * alpha + g[i] * g[i] * rest;
        float sum = b[i] * momentum + g[i] / (sqrtf(square) + eps);
        v_next[i] = square;
        b_next[i] = sum;
        w_next[i] = w[i] - sum * lr;
    }
}

FOR_EACH_PROCESSOR void dlctl_adam(const Block *block, const float *constants) {
    const float rate = constants[0], rest1 = constants[1], beta2 = constants[2];
    const float rest2 = constants[3], root_of_bias = constants[4], eps = constants[5];
    const float stays = constants[6];
    const float *m = block->slots[0], *v = block->slots[1];
    float *m_next = block->slots_next[0], *v_next = block->slots_next[1];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float mean = m[i] + (g[i] - m[i]) * rest1;
        float square = v[i] * beta2 + g[i] * g[i] * rest2;
        m_next[i] = mean;
        v_next[i] = square;
        w_next[i] = w[i] * stays - mean / (sqrtf(square) / root_of_bias + eps) * rate;
    }
}

FOR_EACH_PROCESSOR void dlctl_yogi(const Block *block, const float *constants) {
    const float rate = constants[0], rest1 = constants[1], rest2 = constants[2];
    const float eps = constants[3], stays = constants[4];
    const float *m = block->slots[0], *v = block->slots[1];
    float *m_next = block->slots_next[0], *v_next = block->slots_next[1];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float mean = m[i] + (g[i] - m[i]) * rest1;
        float pushed = g[i] * g[i];
        float square = v[i] - sign(v[i] - pushed) * pushed * rest2;
        m_next[i] = mean;
        v_next[i] = square;
        w_next[i] = w[i] * stays - mean / (sqrtf(square) + eps) * rate;
    }
}

FOR_EACH_PROCESSOR void dlctl_lion(const Block *block, const float *constants) {
    const float lr = constants[0], beta1 = constants[1], rest1 = constants[2];
    const float beta2 = constants[3], rest2 = constants[4], stays = constants[5];
    const float *m = block->slots[0];
    float *m_next = block->slots_next[0];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float along = sign(m[i] * beta1 + g[i] * rest1);
        m_next[i] = m[i] * beta2 + g[i] * rest2;
        w_next[i] = w[i] * stays - along * lr;
    }
}

/* w - (step + g / every) * lr, as DelayedNesterov._descend */
#define DESCENDED(step, g) (w[i] - ((step) + (g) / every) * lr)

FOR_EACH_PROCESSOR void dlctl_nesterov_arrives(const Block *block, const float *constants) {
    const float lr = constants[0], every = constants[1], spread = constants[2];
    const float *m = block->slots[0], *sum = block->slots[1];
    float *m_next = block->slots_next[0], *sum_next = block->slots_next[1];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float x = g[i];
        w_next[i] = DESCENDED(m[i] * spread, x);
        sum_next[i] = sum[i] + x;
        m_next[i] = m[i];
    }
}

FOR_EACH_PROCESSOR void dlctl_nesterov_steps(const Block *block, const float *constants) {
    const float lr = constants[0], every = constants[1], rest = constants[2];
    const float momentum = constants[3];
    const float *m = block->slots[0], *sum = block->slots[1];
    float *m_next = block->slots_next[0], *sum_next = block->slots_next[1];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++) {
        float x = g[i];
        float next = m[i] * momentum + (sum[i] + x) / every;
        m_next[i] = next;
        w_next[i] = DESCENDED(next * rest, x);
        sum_next[i] = 0;
    }
}

FOR_EACH_PROCESSOR void dlctl_accrue(const Block *block, const float *constants) {
    const float stays = constants[0];
    UNPACK
    NO_DEPENDENCE
    for (Py_ssize_t i = 0; i < n; i++)
        w_next[i] = w[i] * stays + g[i];
}

/* name, number of slots, number of constants */
#define RULES(RULE)                                                                                \
    RULE(sgd, 0, 2)                                                                                \
    RULE(momentum, 1, 4)                                                                           \
    RULE(adagrad, 1, 2)                                                                            \
    RULE(rmsprop, 2, 5)                                                                            \
    RULE(adam, 2, 7)                                                                               \
    RULE(yogi, 2, 5)                                                                               \
    RULE(lion, 1, 6)                                                                               \
    RULE(nesterov_arrives, 2, 3)                                                                   \
    RULE(nesterov_steps, 2, 4)                                                                     \
    RULE(accrue, 0, 1)

/* ------------------------------------------------------------------ memory of arrays */

/* The memory of all arrays of a call. They are contiguous, of machine values; the caller has
 * checked their types. */
typedef struct {
    Py_buffer views[2 * SLOTS_MAX + 3];
    int count;
} Arrays;

static void let_go(Arrays *arrays) {
    while (arrays->count > 0)
        PyBuffer_Release(&arrays->views[--arrays->count]);
}

/* The memory of an array of `size_bytes` bytes (any, if negative), or NULL with an exception. */
static void *memory(Arrays *arrays, PyObject *array, Py_ssize_t size_bytes, int flags) {
    Py_buffer *view = &arrays->views[arrays->count];
    if (PyObject_GetBuffer(array, view, flags) < 0)
        return NULL;
    arrays->count++;
    if (size_bytes >= 0 && view->len != size_bytes) {
        PyErr_Format(PyExc_ValueError, "an array has %zd bytes, not %zd", view->len, size_bytes);
        return NULL;
    }
    return view->buf;
}

static Py_ssize_t length_bytes(const Arrays *arrays) {
    return arrays->views[arrays->count - 1].len;
}

/* ------------------------------------------------------------------ step */

static int read_block(Block *block, Arrays *arrays, PyObject *const *args, Py_ssize_t slots) {
    const int in = PyBUF_SIMPLE, out = PyBUF_WRITABLE;
    if (!(block->w = memory(arrays, args[0], -1, in)))
        return -1;
    const Py_ssize_t bytes = length_bytes(arrays);
    block->size = bytes / (Py_ssize_t)sizeof(float);
    if (!(block->g = memory(arrays, args[1], bytes, in)) ||
        !(block->w_next = memory(arrays, args[2], bytes, out)))
        return -1;
    if (PyTuple_Size(args[3]) != slots || PyTuple_Size(args[4]) != slots) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "this rule has %zd slots", slots);
        return -1;
    }
    for (Py_ssize_t i = 0; i < slots; i++) {
        PyObject *now = PyTuple_GetItem(args[3], i), *next = PyTuple_GetItem(args[4], i);
        if (!(block->slots[i] = memory(arrays, now, bytes, in)) ||
            !(block->slots_next[i] = memory(arrays, next, bytes, out)))
            return -1;
    }
    return 0;
}

static int read_constants(float *constants, PyObject *found, Py_ssize_t count) {
    if (PyTuple_Size(found) != count) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "this rule has %zd constants", count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        double value = PyFloat_AsDouble(PyTuple_GetItem(found, i));
        if (value == -1.0 && PyErr_Occurred())
            return -1;
        constants[i] = (float)value;
    }
    return 0;
}

static PyObject *update(PyObject *const *args, Py_ssize_t count, Step *step, Py_ssize_t slots,
                        Py_ssize_t constants_count) {
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "takes (constants, w, g, w_next, slots, slots_next)");
        return NULL;
    }
    Arrays arrays = {.count = 0};
    Block block;
    float constants[CONSTANTS_MAX];
    if (read_constants(constants, args[0], constants_count) < 0 ||
        read_block(&block, &arrays, args + 1, slots) < 0) {
        let_go(&arrays);
        return NULL;
    }
    PyThreadState *thread = block.size > LOCK_MAX ? PyEval_SaveThread() : NULL;
    feclearexcept(FE_OVERFLOW | FE_INVALID | FE_DIVBYZERO);
    step(&block, constants);
    const int flags = fetestexcept(FE_OVERFLOW | FE_INVALID | FE_DIVBYZERO);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    return PyBool_FromLong(flags);
}

#define METHOD(name, slots, constants)                                                             \
    static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count) {               \
        return update(args, count, dlctl_##name, slots, constants);                                \
    }
RULES(METHOD)

/* ------------------------------------------------------------------ gather, scatter */

/* Both copy between `all`, an array of `size` elements of 4 or 8 bytes, and `some`, one element
 * for each of `count` positions. They return -1 and stop at a position that is not in `all`. */
#define COPIES(name, Value, Position)                                                              \
    static int gather_##name(const void *from, Py_ssize_t size, const void *at, void *to,          \
                             Py_ssize_t count) {                                                   \
        const Value *all = from;                                                                   \
        const Position *positions = at;                                                            \
        Value *some = to;                                                                          \
        for (Py_ssize_t i = 0; i < count; i++) {                                                   \
            if ((uint64_t)positions[i] >= (uint64_t)size)                                          \
                return -1;                                                                         \
            some[i] = all[positions[i]];                                                           \
        }                                                                                          \
        return 0;                                                                                  \
    }                                                                                              \
    static int scatter_##name(void *to, Py_ssize_t size, const void *at, const void *from,         \
                              Py_ssize_t count) {                                                  \
        Value *all = to;                                                                           \
        const Position *positions = at;                                                            \
        const Value *some = from;                                                                  \
        for (Py_ssize_t i = 0; i < count; i++) {                                                   \
            if ((uint64_t)positions[i] >= (uint64_t)size)                                          \
                return -1;                                                                         \
            all[positions[i]] = some[i];                                                           \
        }                                                                                          \
        return 0;                                                                                  \
    }

COPIES(4_by_4, uint32_t, uint32_t)
COPIES(4_by_8, uint32_t, int64_t)
COPIES(8_by_4, uint64_t, uint32_t)
COPIES(8_by_8, uint64_t, int64_t)

static PyObject *copied(PyObject *const *args, Py_ssize_t count, int is_gather) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "takes 3 arguments");
        return NULL;
    }
    Arrays arrays = {.count = 0};
    void *all = memory(&arrays, args[0], -1, is_gather ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    void *at = all ? memory(&arrays, args[1], -1, PyBUF_SIMPLE) : NULL;
    void *some = at ? memory(&arrays, args[2], -1, is_gather ? PyBUF_WRITABLE : PyBUF_SIMPLE) : NULL;
    if (!some) {
        let_go(&arrays);
        return NULL;
    }
    const Py_ssize_t value = arrays.views[0].itemsize, position = arrays.views[1].itemsize;
    const Py_ssize_t size = arrays.views[0].len / value, elements = arrays.views[1].len / position;
    if ((value != 4 && value != 8) || (position != 4 && position != 8) ||
        arrays.views[2].len != elements * value) {
        let_go(&arrays);
        PyErr_SetString(PyExc_ValueError, "positions and values are not of one length");
        return NULL;
    }
    PyThreadState *thread = elements > LOCK_MAX ? PyEval_SaveThread() : NULL;
    int result;
    if (is_gather)
        result = (value == 4 ? position == 4 ? gather_4_by_4 : gather_4_by_8
                  : position == 4 ? gather_8_by_4 : gather_8_by_8)(all, size, at, some, elements);
    else
        result = (value == 4 ? position == 4 ? scatter_4_by_4 : scatter_4_by_8
                  : position == 4 ? scatter_8_by_4 : scatter_8_by_8)(all, size, at, some, elements);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    if (result < 0) {
        PyErr_Format(PyExc_IndexError, "a position is not within %zd elements", size);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* gather(array, positions, out): out[:] = array[positions] */
static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return copied(args, count, 1);
}

/* scatter(array, positions, values): array[positions] = values */
static PyObject *scatter(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return copied(args, count, 0);
}

/* ------------------------------------------------------------------ values of 16 bits */

typedef union {
    uint32_t bits;
    float value;
} Float;

enum { HALF_EXPONENT = 0x7c00, BFLOAT_EXPONENT = 0x7f80 };

/* As ?: of bits, without a branch, so that compilers vectorise what is computed in both. */
#define CHOICE(condition, yes, no)                                                                 \
    ((-(uint32_t)(condition) & (uint32_t)(yes)) | (((uint32_t)(condition) - 1) & (uint32_t)(no)))

/* float16: 1 bit of sign, 5 of exponent, 10 of fraction */
static inline float from_half(uint16_t half) {
    const uint32_t exponent = half & HALF_EXPONENT, body = (uint32_t)(half & 0x7fff) << 13;
    const Float small = {.value = (float)(int32_t)(half & 0x3ff) * 0x1p-24f};
    const uint32_t normal = body + ((uint32_t)(127 - 15) << 23), special = body | 0x7f800000u;
    const uint32_t size = CHOICE(exponent == 0, small.bits,
                                 CHOICE(exponent == HALF_EXPONENT, special, normal));
    return ((Float){.bits = size | (uint32_t)(half & 0x8000) << 16}).value;
}

/* Rounded to the nearest, ties to even. */
static inline uint16_t to_half(float value) {
    const Float given = {.value = value};
    const uint32_t size = given.bits & 0x7fffffffu, sign = (given.bits >> 16) & 0x8000;
    /* Next to 0.5 the last bit of a float32 is that of the smallest numbers of float16. */
    const Float small = {.value = ((Float){.bits = size}).value + 0.5f};
    const uint32_t normal = (size - ((uint32_t)(127 - 15) << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t nan = 0x7e00u | ((size >> 13) & 0x3ff);
    const uint32_t large = CHOICE(size > 0x7f800000u, nan, HALF_EXPONENT);
    const uint32_t found = CHOICE(size >= 0x47800000u, large, /* 2^16 */
                                  CHOICE(size < 0x38800000u, small.bits - 0x3f000000u, /* 2^-14 */
                                         normal));
    return (uint16_t)(found | sign);
}

/* bfloat16: the upper half of a float32 */
static inline float from_bfloat(uint16_t bfloat) {
    return ((Float){.bits = (uint32_t)bfloat << 16}).value;
}

static inline uint16_t to_bfloat(float value) {
    const Float given = {.value = value};
    const uint32_t rounded = (given.bits + 0x7fff + ((given.bits >> 16) & 1)) >> 16;
    return (given.bits & 0x7fffffffu) > 0x7f800000u ? BFLOAT_EXPONENT | 0x40 : (uint16_t)rounded;
}

/* Of `n` values. narrow tells whether some do not fit; rest leaves what narrow has rounded away. */
#define CONVERSIONS(kind, exponent)                                                                \
    FOR_EACH_PROCESSOR int dlctl_widen_##kind(const void *from, void *to, Py_ssize_t n) {          \
        const uint16_t *narrow = from;                                                             \
        float *wide = to;                                                                          \
        NO_DEPENDENCE                                                                              \
        for (Py_ssize_t i = 0; i < n; i++)                                                         \
            wide[i] = from_##kind(narrow[i]);                                                      \
        return 0;                                                                                  \
    }                                                                                              \
    FOR_EACH_PROCESSOR int dlctl_narrow_##kind(const void *from, void *to, Py_ssize_t n) {         \
        const float *wide = from;                                                                  \
        uint16_t *narrow = to;                                                                     \
        int are_too_large = 0;                                                                     \
        NO_DEPENDENCE                                                                              \
        for (Py_ssize_t i = 0; i < n; i++) {                                                       \
            narrow[i] = to_##kind(wide[i]);                                                        \
            are_too_large |= (narrow[i] & exponent) == exponent;                                   \
        }                                                                                          \
        return are_too_large;                                                                      \
    }                                                                                              \
    FOR_EACH_PROCESSOR int dlctl_rest_##kind(const void *from, void *to, Py_ssize_t n) {           \
        const uint16_t *narrow = from;                                                             \
        float *wide = to;                                                                          \
        NO_DEPENDENCE                                                                              \
        for (Py_ssize_t i = 0; i < n; i++)                                                         \
            wide[i] -= from_##kind(narrow[i]);                                                     \
        return 0;                                                                                  \
    }

CONVERSIONS(half, HALF_EXPONENT)
CONVERSIONS(bfloat, BFLOAT_EXPONENT)

typedef int Conversion(const void *, void *, Py_ssize_t);

/* from and to: of from_bytes and to_bytes a value, and of one length */
static PyObject *converted(PyObject *const *args, Py_ssize_t count, Conversion *convert,
                           Py_ssize_t from_bytes, Py_ssize_t to_bytes) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "takes (from, to)");
        return NULL;
    }
    Arrays arrays = {.count = 0};
    const void *from = memory(&arrays, args[0], -1, PyBUF_SIMPLE);
    const Py_ssize_t size = from ? length_bytes(&arrays) / from_bytes : 0;
    void *to = from ? memory(&arrays, args[1], size * to_bytes, PyBUF_WRITABLE) : NULL;
    if (!to) {
        let_go(&arrays);
        return NULL;
    }
    PyThreadState *thread = size > LOCK_MAX ? PyEval_SaveThread() : NULL;
    const int result = convert(from, to, size);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    return PyBool_FromLong(result);
}

#define CONVERSION_OF(name, from, to)                                                              \
    static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count) {               \
        return converted(args, count, dlctl_##name, from, to);                                     \
    }
#define HALVES(ENTRY)                                                                              \
    ENTRY(widen_half, 2, 4)                                                                        \
    ENTRY(narrow_half, 4, 2)                                                                       \
    ENTRY(rest_half, 2, 4)                                                                         \
    ENTRY(widen_bfloat, 2, 4)                                                                      \
    ENTRY(narrow_bfloat, 4, 2)                                                                     \
    ENTRY(rest_bfloat, 2, 4)
HALVES(CONVERSION_OF)

/* ------------------------------------------------------------------ signs */

enum { ROW = 1024 };
/* Elements with one mean for each sign, as dlctl/compress/blocks.py cuts them. */

/* to[i] = the mean of its row for bit i, lowest bit of a byte first; means: those of all rows for a
 * 1, then those for a 0. As bits, so that all of NaN stays. */
FOR_EACH_PROCESSOR void dlctl_from_signs(const uint8_t *bits, const uint32_t *means,
                                         Py_ssize_t rows, uint32_t *to, Py_ssize_t size) {
    for (Py_ssize_t row = 0; row < rows; row++) {
        const uint32_t ones = means[row], zeros = means[rows + row];
        const Py_ssize_t first = row * ROW, left = size - first, n = left < ROW ? left : ROW;
        const uint8_t *octets = bits + first / 8;
        uint32_t *some = to + first;
        NO_DEPENDENCE
        for (Py_ssize_t i = 0; i < n / 8; i++)
            for (int bit = 0; bit < 8; bit++)
                some[8 * i + bit] = CHOICE((octets[i] >> bit) & 1, ones, zeros);
        for (Py_ssize_t i = n / 8 * 8; i < n; i++)
            some[i] = CHOICE((octets[i / 8] >> (i % 8)) & 1, ones, zeros);
    }
}

/* from_signs(bits, means, to) */
static PyObject *from_signs(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "takes (bits, means, to)");
        return NULL;
    }
    Arrays arrays = {.count = 0};
    void *to = memory(&arrays, args[2], -1, PyBUF_WRITABLE);
    const Py_ssize_t size = to ? length_bytes(&arrays) / (Py_ssize_t)sizeof(float) : 0;
    const Py_ssize_t rows = size / ROW + (size % ROW != 0);
    const void *bits = to ? memory(&arrays, args[0], size / 8 + (size % 8 != 0), PyBUF_SIMPLE) : NULL;
    const void *means =
        bits ? memory(&arrays, args[1], 2 * rows * (Py_ssize_t)sizeof(float), PyBUF_SIMPLE) : NULL;
    if (!means) {
        let_go(&arrays);
        return NULL;
    }
    PyThreadState *thread = size > LOCK_MAX ? PyEval_SaveThread() : NULL;
    dlctl_from_signs(bits, means, rows, to, size);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ positions */

/* As dlctl/compress/indices.py codes them: `low` has the lowest `bits` bits of each gap, `mask` a
 * set bit for each position. */
typedef struct {
    const int64_t *given; /* to pack */
    int64_t *found;       /* to unpack */
    Py_ssize_t count, low_bytes, mask_bytes;
    int bits;
    uint8_t *low, *mask;
} Positions;

static inline uint64_t word_at(const uint8_t *octets, Py_ssize_t left) {
    uint64_t word = 0;
    if (left >= 8)
        for (int i = 0; i < 8; i++)
            word |= (uint64_t)octets[i] << (8 * i);
    else
        for (int i = 0; i < left; i++)
            word |= (uint64_t)octets[i] << (8 * i);
    return word;
}

/* 1, or 0 if there are more or fewer set bits than positions, or one is not below `size`. */
static int unpack_them(const Positions *these, uint64_t size) {
    const uint64_t most = ((uint64_t)1 << these->bits) - 1;
    uint64_t next = 0; /* the least that the next position may be */
    Py_ssize_t i = 0, skipped = 0;
    for (Py_ssize_t at = 0; at < these->mask_bytes; at += 8) {
        const Py_ssize_t left = these->mask_bytes - at;
        uint64_t word = word_at(these->mask + at, left);
        for (; word; word &= word - 1) {
            const Py_ssize_t bit = 8 * at + __builtin_ctzll(word);
            if (i == these->count)
                return 0;
            const Py_ssize_t first = i * these->bits, octet = first / 8;
            const uint64_t low = word_at(these->low + octet, these->low_bytes - octet);
            const uint64_t high = (uint64_t)(bit - i - skipped);
            if (high > size >> these->bits)
                return 0;
            const uint64_t found = next + (high << these->bits) + ((low >> first % 8) & most);
            if (found >= size)
                return 0;
            these->found[i] = (int64_t)found;
            next = found + 1;
            skipped = bit - i;
            i++;
        }
    }
    return i == these->count;
}

/* Bits set in the mask, which is zeros, as `low` is; or -1: it is too short, or a position is not
 * above the one before it. */
static Py_ssize_t pack_them(const Positions *these) {
    const uint64_t most = ((uint64_t)1 << these->bits) - 1;
    int64_t next = 0;
    Py_ssize_t bit = -1;
    for (Py_ssize_t i = 0; i < these->count; i++) {
        const int64_t gap = these->given[i] - next;
        if (gap < 0 || gap >> these->bits >= 8 * these->mask_bytes - bit - 1)
            return -1;
        const Py_ssize_t first = i * these->bits;
        const uint64_t low = ((uint64_t)gap & most) << first % 8;
        for (int octet = 0; octet * 8 < these->bits + first % 8; octet++)
            these->low[first / 8 + octet] |= (uint8_t)(low >> (8 * octet));
        bit += 1 + (Py_ssize_t)(gap >> these->bits);
        these->mask[bit / 8] |= (uint8_t)(1 << bit % 8);
        next = these->given[i] + 1;
    }
    return bit + 1;
}

enum { BITS_MAX = 56 };

/* Reads (positions, bits, low, mask): the first one to read if it is packed. */
static int read_positions(Positions *these, Arrays *arrays, PyObject *const *args, int is_packing) {
    const int in = PyBUF_SIMPLE, out = PyBUF_WRITABLE;
    const Py_ssize_t bits = PyLong_AsSsize_t(args[1]);
    if (bits == -1 && PyErr_Occurred())
        return -1;
    void *positions = memory(arrays, args[0], -1, is_packing ? in : out);
    if (!positions)
        return -1;
    these->given = these->found = positions;
    these->count = length_bytes(arrays) / (Py_ssize_t)sizeof(int64_t);
    if (bits < 0 || bits > BITS_MAX || these->count > PY_SSIZE_T_MAX / 64) {
        PyErr_SetString(PyExc_ValueError, "there are 0 to 56 low bits");
        return -1;
    }
    these->bits = (int)bits;
    these->low_bytes = (these->count * bits + 7) / 8;
    if (!(these->low = memory(arrays, args[2], these->low_bytes, is_packing ? out : in)) ||
        !(these->mask = memory(arrays, args[3], -1, is_packing ? out : in)))
        return -1;
    these->mask_bytes = length_bytes(arrays);
    return 0;
}

/* unpack_positions(out, bits, low, mask, size): whether it could; out has anything if not. */
static PyObject *unpack_positions(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arrays arrays = {.count = 0};
    Positions these;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "takes (out, bits, low, mask, size)");
        return NULL;
    }
    const Py_ssize_t size = PyLong_AsSsize_t(args[4]);
    if ((size == -1 && PyErr_Occurred()) || read_positions(&these, &arrays, args, 0) < 0) {
        let_go(&arrays);
        return NULL;
    }
    PyThreadState *thread = these.count > LOCK_MAX ? PyEval_SaveThread() : NULL;
    const int could = size >= 0 && unpack_them(&these, (uint64_t)size);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    return PyBool_FromLong(could);
}

/* pack_positions(positions, bits, low, mask): into zeros; the length of the mask in bits. */
static PyObject *pack_positions(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arrays arrays = {.count = 0};
    Positions these;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "takes (positions, bits, low, mask)");
        return NULL;
    }
    if (read_positions(&these, &arrays, args, 1) < 0) {
        let_go(&arrays);
        return NULL;
    }
    PyThreadState *thread = these.count > LOCK_MAX ? PyEval_SaveThread() : NULL;
    const Py_ssize_t bits = pack_them(&these);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    if (bits < 0)
        PyErr_SetString(PyExc_ValueError, "the positions do not ascend, or not within the mask");
    return bits < 0 ? NULL : PyLong_FromSsize_t(bits);
}

/* ------------------------------------------------------------------ checks of values */

enum { SUMMED = 1 << 16, LANES = 64 };
/* SUMMED: elements whose squares are summed in float32; these sums, in float64. */

/* Not in numpy's order: whoever needs the last bits asks numpy. */
FOR_EACH_PROCESSOR double dlctl_squares(const float *x, Py_ssize_t size) {
    double total = 0;
    for (Py_ssize_t first = 0; first < size; first += SUMMED) {
        const float *some = x + first;
        const Py_ssize_t left = size - first, n = left < SUMMED ? left : SUMMED;
        const Py_ssize_t whole = n / LANES * LANES;
        float sums[LANES] = {0};
        for (Py_ssize_t i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++)
                sums[lane] += some[i + lane] * some[i + lane];
        for (Py_ssize_t i = whole; i < n; i++)
            sums[i - whole] += some[i] * some[i];
        for (int lane = 0; lane < LANES; lane++)
            total += sums[lane];
    }
    return total;
}

/* Whether no element is infinite or NaN. */
FOR_EACH_PROCESSOR int dlctl_are_finite(const uint32_t *x, Py_ssize_t size) {
    for (Py_ssize_t first = 0; first < size; first += SUMMED) {
        const uint32_t *some = x + first;
        const Py_ssize_t left = size - first, n = left < SUMMED ? left : SUMMED;
        uint32_t carries = 0;
        for (Py_ssize_t i = 0; i < n; i++)
            carries |= (some[i] & 0x7fffffffu) + 0x00800000u; /* of an exponent of all ones */
        if (carries >> 31)
            return 0;
    }
    return 1;
}

/* are_finite and squares (array): of float32 */
static PyObject *checked(PyObject *const *args, Py_ssize_t count, int is_sum) {
    if (count != 1) {
        PyErr_SetString(PyExc_TypeError, "takes (array)");
        return NULL;
    }
    Arrays arrays = {.count = 0};
    const void *x = memory(&arrays, args[0], -1, PyBUF_SIMPLE);
    if (!x)
        return NULL;
    const Py_ssize_t size = length_bytes(&arrays) / (Py_ssize_t)sizeof(float);
    PyThreadState *thread = size > LOCK_MAX ? PyEval_SaveThread() : NULL;
    const double sum = is_sum ? dlctl_squares(x, size) : 0;
    const int are_finite = is_sum ? 0 : dlctl_are_finite(x, size);
    if (thread)
        PyEval_RestoreThread(thread);
    let_go(&arrays);
    return is_sum ? PyFloat_FromDouble(sum) : PyBool_FromLong(are_finite);
}

static PyObject *squares(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return checked(args, count, 1);
}

static PyObject *are_finite(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return checked(args, count, 0);
}

/* ------------------------------------------------------------------ the module */

static PyMethodDef METHODS[] = {
#define ENTRY(name, ...) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL},
    RULES(ENTRY)
    HALVES(ENTRY)
    ENTRY(from_signs)
    ENTRY(pack_positions)
    ENTRY(unpack_positions)
    ENTRY(squares)
    ENTRY(are_finite)
    ENTRY(gather)
    ENTRY(scatter)
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernels", "Loops of dlctl's servers.", -1, METHODS,
};

PyMODINIT_FUNC PyInit__kernels(void) {
    PyObject *module = PyModule_Create(&MODULE);
#define NAME(name, ...) " " #name
    if (module && PyModule_AddStringConstant(module, "RULES", &(RULES(NAME))[1]) < 0)
        return NULL;
    return module;
}
