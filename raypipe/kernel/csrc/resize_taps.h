/* Where the pixels of a resized image come from, and their coefficients, exactly as OpenCV makes them.
 *
 * They are made of doubles and floats, and are integers from there on. So this file needs -ffp-contract=off.
 */
#ifndef RAYPIPE_RESIZE_TAPS_H
#define RAYPIPE_RESIZE_TAPS_H

#include "image.h"

#define COEFFICIENT_BITS 11
#define ONE (1 << COEFFICIENT_BITS)
#define MAX_TAPS 4

/* Where the pixels of a row or column of the result come from. */
typedef struct {
    int source, result; /* sides, pixels */
    double scale;       /* source / result, as OpenCV rounds it */
} Axis;

/* The first of 2 source pixels, or the second of 4, and coefficients. */
typedef struct {
    int at;
    int16_t coefficients[MAX_TAPS];
} Taps;

static Axis axis_of(int source, int result)
{
    const double inverse = (double)result / source;
    return (Axis){source, result, 1.0 / inverse};
}

static inline int floor_of(double value)
{
    const int down = (int)value;
    return down - (value < down);
}

/* The nearest integer, halves to even, by what the addition itself rounds; |value| < 2^22. */
static inline int16_t round_of(float value)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    return (int16_t)((value + magic) - magic);
}

/* The position of a pixel of the result, and what it is behind pixel `at`. */
static inline float position(const Axis *axis, int number, int *at)
{
    const float place = (float)((number + 0.5) * axis->scale - 0.5);
    *at = floor_of(place);
    return place - (float)*at;
}

static inline Taps linear_taps(const Axis *axis, int number)
{
    Taps taps = {0};
    const float behind = position(axis, number, &taps.at);
    taps.coefficients[0] = round_of((1.0f - behind) * ONE);
    taps.coefficients[1] = round_of(behind * ONE);
    return taps;
}

/* Columns: unlike rows, they have the whole of the outermost pixel beyond its middle. Both pixels are in the row. */
static inline Taps linear_column(const Axis *axis, int number)
{
    Taps taps = linear_taps(axis, number);
    const int is_before = taps.at < 0, is_behind = taps.at >= axis->source - 1;
    if (is_before || is_behind) {
        const int is_second = is_behind && axis->source > 1; /* of the last two */
        taps.at = is_second ? axis->source - 2 : 0;
        taps.coefficients[0] = is_second ? 0 : ONE;
        taps.coefficients[1] = is_second ? ONE : 0;
    }
    return taps;
}

static inline Taps cubic_taps(const Axis *axis, int number)
{
    const float a = -0.75f;
    Taps taps = {0};
    const float x = position(axis, number, &taps.at), y = 1.0f - x;
    const float c0 = ((a * (x + 1.0f) - 5.0f * a) * (x + 1.0f) + 8.0f * a) * (x + 1.0f) - 4.0f * a;
    const float c1 = ((a + 2.0f) * x - (a + 3.0f)) * x * x + 1.0f;
    const float c2 = ((a + 2.0f) * y - (a + 3.0f)) * y * y + 1.0f;
    const float c3 = 1.0f - c0 - c1 - c2;
    taps.coefficients[0] = round_of(c0 * ONE);
    taps.coefficients[1] = round_of(c1 * ONE);
    taps.coefficients[2] = round_of(c2 * ONE);
    taps.coefficients[3] = round_of(c3 * ONE);
    return taps;
}

static inline int bound(int at, int side) { return at < 0 ? 0 : at >= side ? side - 1 : at; }
#endif
